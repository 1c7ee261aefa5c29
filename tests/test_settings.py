import argparse
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from service.settings import ENV_PREFIX, Settings, SettingsError, add_arguments, parse_settings

DEFAULTS: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 8080,
    "log_level": "info",
    "model": "demo",
    "served_model_name": None,
    "revision": None,
    "dtype": "auto",
    "device": "auto",
    "mm_encoder_attn_backend": "auto",
    "min_pixels": None,
    "max_pixels": None,
    "max_body_bytes": 67_108_864,
    "max_image_bytes": 20_971_520,
    "max_image_pixels": 67_108_864,
    "max_images_per_request": 32,
    "max_request_tokens": 65_536,
    "body_timeout_s": 30.0,
    "decode_threads": len(os.sched_getaffinity(0)),
    "shutdown_grace_s": 35.0,
}
# For each setting a value other than its default.
OTHERS = {
    "host": "0.0.0.0",
    "port": "0",
    "log_level": "debug",
    "model": "Qwen/Qwen3-VL-8B-Instruct",
    "served_model_name": "eyes",
    "revision": "v1",
    "dtype": "bfloat16",
    "device": "cuda:1",
    "mm_encoder_attn_backend": "FLASH_ATTN",
    "min_pixels": "1024",
    "max_pixels": "2048",
    "max_body_bytes": "30000000",
    "max_image_bytes": "1000",
    "max_image_pixels": "1001",
    "max_images_per_request": "2",
    "max_request_tokens": "3",
    "body_timeout_s": "0.5",
    "decode_threads": "5",
    "shutdown_grace_s": "1.5",
}
# What some of them need beside them.
COMPANIONS = {"revision": ["--model", "some/model"]}


def test_defaults_are_those_of_the_contract() -> None:
    assert parse_settings([], {}).model_dump() == DEFAULTS


def test_tables_of_this_test_are_complete() -> None:
    assert list(DEFAULTS) == list(OTHERS) == list(Settings.model_fields)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("spelling", ["flag", "flag=", "underscores", "variable"])
def test_every_setting_is_a_flag_and_a_variable(name: str, spelling: str) -> None:
    value = OTHERS[name]
    flag = "--" + name.replace("_", "-")
    argv = {
        "flag": [flag, value],
        "flag=": [f"{flag}={value}"],
        "underscores": [f"--{name}", value],
        "variable": [],
    }
    environ = {ENV_PREFIX + name.upper(): value} if spelling == "variable" else {}
    settings = parse_settings([*argv[spelling], *COMPANIONS.get(name, [])], environ)
    expected = type(getattr(settings, name))(value)
    assert getattr(settings, name) == expected != DEFAULTS[name]


def test_flags_win_over_variables() -> None:
    environ = {
        "VISION_SIDECAR_PORT": "1",
        "VISION_SIDECAR_HOST": "::1",
        "PORT": "7",
        "VISION_SIDECARPORT": "8",
    }
    settings = parse_settings(["--port", "2"], environ)
    assert (settings.port, settings.host) == (2, "::1")


def test_empty_variable_counts_as_not_set() -> None:
    assert parse_settings(
        [], {"VISION_SIDECAR_MIN_PIXELS": "", "VISION_SIDECAR_MODEL": ""}
    ) == parse_settings([], {})


def test_variables_that_kubernetes_sets_for_a_service_of_our_name_are_ignored() -> None:
    environ = {
        "VISION_SIDECAR_SERVICE_HOST": "10.0.0.1",
        "VISION_SIDECAR_SERVICE_PORT": "8080",
        "VISION_SIDECAR_SERVICE_PORT_HTTP": "8080",
        "VISION_SIDECAR_PORT": "tcp://10.0.0.1:8080",
        "VISION_SIDECAR_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "VISION_SIDECAR_PORT_8080_TCP_ADDR": "10.0.0.1",
        "VISION_SIDECAR_PORT_8080_TCP_PORT": "8080",
        "VISION_SIDECAR_PORT_8080_TCP_PROTO": "tcp",
    }
    assert parse_settings([], environ) == parse_settings([], {})


@pytest.mark.parametrize(
    ("argv", "environ", "parts"),
    [
        (["--prot", "1"], {}, ["--prot", "did you mean --port?"]),
        (["--max-body-byte=1"], {}, ["--max-body-byte;", "did you mean --max-body-bytes?"]),
        (["--por", "1"], {}, ["--por"]),  # no abbreviations
        (["extra"], {}, ["extra"]),
        (["--port"], {}, ["--port", "expected one argument"]),
        ([], {"VISION_SIDECAR_PROT": "1"}, ["VISION_SIDECAR_PROT", "did you mean VISION_SIDECAR_PORT?"]),
        ([], {"VISION_SIDECAR_port": "1"}, ["VISION_SIDECAR_port"]),
        ([], {"VISION_SIDECAR_ZZZZ": ""}, ["VISION_SIDECAR_ZZZZ"]),
        (["--port", "x"], {"VISION_SIDECAR_PORT": "1"}, ["--port: 'x'", "integer"]),
        ([], {"VISION_SIDECAR_PORT": "x"}, ["VISION_SIDECAR_PORT: 'x'", "integer"]),
        (["--port", "65536"], {}, ["--port: '65536'", "65535"]),
        (["--port", "-1"], {}, ["--port: '-1'", "greater than or equal to 0"]),
        (["--dtype", "int8"], {}, ["--dtype: 'int8'", "'auto', 'float32', 'float16' or 'bfloat16'"]),
        (["--log-level", "INFO"], {}, ["--log-level: 'INFO'", "'info'"]),
        (["--device", "tpu"], {}, ["--device: 'tpu'", "auto|cpu|cuda"]),
        (["--mm-encoder-attn-backend", "xformers"], {}, ["--mm-encoder-attn-backend", "TORCH_SDPA"]),
        (["--min-pixels", "0"], {}, ["--min-pixels: '0'", "greater than or equal to 1"]),
        (["--max-image-pixels", "1.5"], {}, ["--max-image-pixels: '1.5'", "integer"]),
        (["--decode-threads", "0"], {}, ["--decode-threads: '0'", "1"]),
        (["--body-timeout-s", "0"], {}, ["--body-timeout-s: '0'", "greater than 0"]),
        (["--body-timeout-s", "inf"], {}, ["--body-timeout-s: 'inf'", "finite"]),
        (["--shutdown-grace-s", "nan"], {}, ["--shutdown-grace-s: 'nan'"]),
        (["--host", ""], {}, ["--host: ''"]),
        (["--max-body-bytes", "5"], {}, ["--max-image-bytes 20971520", "--max-body-bytes 5"]),
        (["--min-pixels", "9", "--max-pixels", "8"], {}, ["--min-pixels 9", "--max-pixels 8"]),
        (["--revision", "v1"], {}, ["--revision v1", "--model", "demo"]),
        (["--revision", "v1", "--model", "./folder"], {}, ["--revision v1", "--model", "./folder"]),
    ],
)
def test_bad_settings_are_refused_in_one_line(
    argv: list[str], environ: dict[str, str], parts: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings(argv, environ)
    message = str(caught.value)
    assert "\n" not in message
    for text in parts:
        assert text in message


def test_equal_limits_are_no_contradiction() -> None:
    settings = parse_settings(
        ["--max-body-bytes=7", "--max-image-bytes=7", "--min-pixels=5", "--max-pixels=5"], {}
    )
    assert settings.max_body_bytes == settings.max_image_bytes


def test_settings_are_immutable() -> None:
    with pytest.raises(ValidationError):
        parse_settings([], {}).port = 1


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("demo", "demo"),
        ("Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-VL-8B-Instruct"),
        ("gpt2", "gpt2"),
        ("/secret/place/qwen", "qwen"),
        ("./place/qwen/", "qwen"),
        ("../qwen", "qwen"),
        ("~/qwen", "qwen"),
        ("a/b/qwen", "qwen"),
        ("/", "model"),
    ],
)
def test_served_name_is_a_hub_id_or_a_folders_name(model: str, name: str) -> None:
    assert parse_settings(["--model", model], {}).served_name == name


def test_served_name_of_a_relative_folder_has_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_settings(["--model", "owner/name"], {}).served_name == "name"
    assert parse_settings(["--model", "."], {}).served_name == tmp_path.name


def test_served_name_can_be_set() -> None:
    assert parse_settings(["--served-model-name", "eyes", "--model", "/a/b"], {}).served_name == "eyes"


def test_help_explains_every_flag_with_default_and_variable() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    text = " ".join(parser.format_help().split())
    for name, field in Settings.model_fields.items():
        assert "--" + name.replace("_", "-") in text
        assert f"({ENV_PREFIX}{name.upper()})" in text
        assert field.description is not None
        assert " ".join(field.description.split()) in text
    assert "largest request body in bytes [67108864]" in text
    assert "[the checkpoint's]" in text
    assert "None" not in text
    assert "--max_body_bytes" not in text


def test_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_settings(["--help"], {})
    assert caught.value.code == 0
    assert "--max-body-bytes" in capsys.readouterr().out

"""Settings as flags and environment variables, and the help."""

from __future__ import annotations

from ipaddress import ip_network
from pathlib import Path

import pytest
from pydantic import SecretStr

from service.config.arguments import ENV_PREFIX, SettingsError, parse_settings
from service.config.settings import Settings

# A value for each setting that is not its default.
OTHERS = {
    "host": "0.0.0.0",
    "port": "0",
    "api_keys": "sk-1,sk-2",
    "api_keys_file": str(Path(__file__).parent / "api-keys.txt"),
    "page": "false",
    "cors_allow_origins": "https://example.org,http://localhost:3000",
    "log_level": "debug",
    "log_format": "json",
    "model": "Qwen/Qwen3-VL-8B-Instruct",
    "served_model_name": "eyes",
    "revision": "v1",
    "dtype": "bfloat16",
    "device": "cuda:1",
    "data_parallel_size": "2",
    "mm_encoder_attn_backend": "FLASH_ATTN_4",
    "cudagraph_mm_encoder": "true",
    "encoder_cudagraph_token_budgets": "64,100,4096",
    "encoder_cudagraph_budget_steps": "3",
    "encoder_cudagraph_max_images_per_batch": "5",
    "min_pixels": "1024",
    "max_pixels": "2048",
    "max_batch_tokens": "4096",
    "max_wait_ms": "2.5",
    "max_queue_tokens": "5000",
    "max_inflight_bytes": "70000000",
    "max_body_bytes": "30000000",
    "max_image_bytes": "1000",
    "max_image_pixels": "1001",
    "max_images_per_request": "2",
    "max_request_tokens": "3",
    "body_timeout_s": "0.5",
    "request_timeout_s": "2.5",
    "device_timeout_s": "7.5",
    "decode_threads": "5",
    "api_server_count": "2",
    "handoff_dir": "/dev/shm/tokens",
    "handoff_bytes": "1000000",
    "handoff_lease_s": "7.5",
    "cache_bytes": "0",
    "llm_url": "http://llm:8000",
    "llm_api_key_file": str(Path(__file__).parent / "llm-api-key.txt"),
    "llm_timeout_s": "7.5",
    "allowed_media_domains": "images.example.org,10.1.2.3",
    "allowed_media_networks": "10.1.0.0/16,fd00::/8",
    "media_timeout_s": "0.5",
    "shutdown_delay_s": "5",
    "shutdown_grace_s": "40.5",
}
# The parsed values, where `type(…)(value)` does not give them.
VALUES = {
    "api_keys": (SecretStr("sk-1"), SecretStr("sk-2")),
    "api_keys_file": Path(OTHERS["api_keys_file"]),
    "page": False,
    "cors_allow_origins": ("https://example.org", "http://localhost:3000"),
    "handoff_dir": Path(OTHERS["handoff_dir"]),
    "llm_api_key_file": Path(OTHERS["llm_api_key_file"]),
    "cudagraph_mm_encoder": True,
    "encoder_cudagraph_token_budgets": (64, 100, 4096),
    "allowed_media_domains": ("images.example.org", "10.1.2.3"),
    "allowed_media_networks": (ip_network("10.1.0.0/16"), ip_network("fd00::/8")),
}
LLM = ["--handoff-dir", "/dev/shm/tokens", "--llm-url", "http://llm:8000"]
# Settings that some others need.
COMPANIONS = {
    "revision": ["--model", "some/model"],
    "allowed_media_networks": ["--allowed-media-domains", "images.example.org"],
    "handoff_bytes": ["--handoff-dir", "/dev/shm/tokens"],
    "handoff_lease_s": ["--handoff-dir", "/dev/shm/tokens"],
    "llm_url": LLM[:2],
    "llm_api_key_file": LLM,
    "llm_timeout_s": LLM,
}


def test_tables_of_this_file_are_complete() -> None:
    assert list(OTHERS) == list(Settings.model_fields)


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
    expected = VALUES[name] if name in VALUES else type(getattr(settings, name))(value)
    assert getattr(settings, name) == expected != getattr(Settings(), name)


def test_flags_win_over_variables() -> None:
    environ = {
        "VISION_SIDECAR_PORT": "1",
        "VISION_SIDECAR_HOST": "::1",
        "PORT": "7",
        "VISION_SIDECARPORT": "8",
    }
    settings = parse_settings(["--port", "2"], environ)
    assert (settings.port, settings.host) == (2, "::1")


def test_empty_variable_counts_as_not_set_unless_it_restricts_access() -> None:
    others = Settings.model_fields.keys() - {"api_keys", "api_keys_file"}
    assert parse_settings([], {ENV_PREFIX + name.upper(): "" for name in others}) == parse_settings([], {})


@pytest.mark.parametrize("service", ["", "METRICS_", "CANARY_2_", "MAX_PIXELS_"])
def test_variables_that_kubernetes_sets_for_a_service_are_ignored(service: str) -> None:
    values = {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "8080",
        "SERVICE_PORT_HTTP_ALT": "8080",
        "PORT": "tcp://10.0.0.1:8080",
        "PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "PORT_8080_TCP_ADDR": "10.0.0.1",
        "PORT_8080_TCP_PORT": "8080",
        "PORT_8080_TCP_PROTO": "tcp",
    }
    environ = {f"VISION_SIDECAR_{service}{name}": value for name, value in values.items()}
    assert parse_settings([], environ) == parse_settings([], {})


@pytest.mark.parametrize(
    ("argv", "environ", "parts"),
    [
        (["--prot", "1"], {}, ["--prot", "did you mean --port?"]),
        (["--max-body-byte=1"], {}, ["--max-body-byte;", "did you mean --max-body-bytes?"]),
        (["--por", "1"], {}, ["--por;", "did you mean --port?"]),  # no abbreviations
        (["--hlep"], {}, ["--hlep", "did you mean --help?"]),
        (["extra"], {}, ["extra"]),
        (["--port"], {}, ["--port", "expected one argument"]),
        ([], {"VISION_SIDECAR_PROT": "1"}, ["VISION_SIDECAR_PROT", "did you mean VISION_SIDECAR_PORT?"]),
        ([], {"VISION_SIDECAR_port": "1"}, ["VISION_SIDECAR_port"]),
        ([], {"VISION_SIDECAR_ZZZZ": ""}, ["VISION_SIDECAR_ZZZZ"]),
        # Kubernetes does not set these for a Service.
        ([], {"VISION_SIDECAR_CANARY_PORT": "8080"}, ["VISION_SIDECAR_CANARY_PORT"]),
        ([], {"VISION_SIDECAR_PORTS": "tcp://10.0.0.1:80"}, ["did you mean VISION_SIDECAR_PORT?"]),
        ([], {"VISION_SIDECAR_HTTP_HOST": "::"}, ["did you mean VISION_SIDECAR_HOST?"]),
        ([], {"VISION_SIDECAR_PORT_HTTP": "8080"}, ["did you mean VISION_SIDECAR_PORT?"]),
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
        (["--data-parallel-size", "0"], {}, ["--data-parallel-size: '0'", "1"]),
        (["--encoder-cudagraph-token-budgets", "64,x"], {}, ["-token-budgets: 'x'", "integer"]),
        (["--encoder-cudagraph-token-budgets", "64,,2"], {}, ["-token-budgets: ''", "integer"]),
        (["--encoder-cudagraph-token-budgets", "64,0"], {}, ["-token-budgets: '0'", "greater"]),
        (["--encoder-cudagraph-budget-steps", "0"], {}, ["--encoder-cudagraph-budget-steps: '0'", "1"]),
        (["--encoder-cudagraph-max-images-per-batch", "-1"], {}, ["-max-images-per-batch: '-1'", "0"]),
        (
            ["--cors-allow-origins", "https://example.org/"],
            {},
            ["--cors-allow-origins: 'https://example.org/'"],
        ),
        (["--cors-allow-origins", "example.org"], {}, ["--cors-allow-origins: 'example.org'"]),
        (
            ["--cors-allow-origins", "*,https://Example.org"],
            {},
            ["--cors-allow-origins: 'https://Example.org'"],
        ),
        (["--allowed-media-domains", "*"], {}, ["--allowed-media-domains: '*'", "a host is"]),
        (
            ["--allowed-media-domains", "a.org,https://b.org"],
            {},
            ["--allowed-media-domains: 'https://b.org'"],
        ),
        (["--allowed-media-domains", "b.org:80"], {}, ["--allowed-media-domains: 'b.org:80'"]),
        (["--allowed-media-domains", "2130706433"], {}, ["--allowed-media-domains: '2130706433'"]),
        (["--allowed-media-networks", "10.0.0.1/8"], {}, ["--allowed-media-networks: '10.0.0.1/8'"]),
        (["--allowed-media-networks", "example.org"], {}, ["--allowed-media-networks: 'example.org'"]),
        (["--media-timeout-s", "0"], {}, ["--media-timeout-s: '0'", "greater than 0"]),
        (["--api-keys="], {}, ["--api-keys", "has no key"]),
        (["--api-keys", " "], {}, ["--api-keys", "has no key"]),
        # An empty secret must not open the server to all.
        ([], {"VISION_SIDECAR_API_KEYS": ""}, ["VISION_SIDECAR_API_KEYS", "has no key"]),
        ([], {"VISION_SIDECAR_API_KEYS": "\n"}, ["VISION_SIDECAR_API_KEYS", "has no key"]),
        ([], {"VISION_SIDECAR_API_KEYS_FILE": ""}, ["VISION_SIDECAR_API_KEYS_FILE: ''", "the path is empty"]),
        (["--api-keys-file="], {}, ["--api-keys-file: ''", "the path is empty"]),
        (["--cudagraph-mm-encoder=maybe"], {}, ["--cudagraph-mm-encoder: 'maybe'", "boolean"]),
        (["--cudagraph-mm-encoder", "extra"], {}, ["--cudagraph-mm-encoder: 'extra'", "boolean"]),
        (["--no-cudagraph-mm-encoder=true"], {}, ["--no-cudagraph-mm-encoder", "true"]),
        ([], {"VISION_SIDECAR_NO_CUDAGRAPH_MM_ENCODER": "1"}, ["VISION_SIDECAR_NO_CUDAGRAPH_MM_ENCODER"]),
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


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        (["--nope"], {}),
        (["-p", "80"], {}),
        (["nope"], {}),
        (["--workers=4"], {}),
        ([], {"VISION_SIDECAR_NOPE": "1"}),
        ([], {"VISION_SIDECAR_WORKERS": "4"}),
    ],
)
def test_unknown_setting_that_is_like_no_other_gets_no_suggestion(
    argv: list[str], environ: dict[str, str]
) -> None:
    with pytest.raises(SettingsError, match=r"^unknown (argument|environment variable) [\w-]+$"):
        parse_settings(argv, environ)


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        (["--api-keys", "fine,secr et"], {}),
        (["--api-keys", "fine,,secret"], {}),
        (["--api-keys", "secr\u00e9t"], {}),
        (["--api-keys", "fine,", "secret"], {}),
        (["--api-keys", "fine", "--port", "x", "secret"], {}),
        (["--api-key=secret"], {}),
        ([], {"VISION_SIDECAR_API_KEYS": "fine,secr et"}),
        ([], {"VISION_SIDECAR_API_KEY": "secret"}),
    ],
)
def test_no_error_shows_a_key(argv: list[str], environ: dict[str, str]) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings(argv, environ)
    assert not any(part in str(caught.value) for part in ("secr", "fine"))
    assert "api-key" in str(caught.value).lower().replace("_", "-")


@pytest.mark.parametrize(
    "argv",
    [
        ["--port", "1" * 5000],
        ["--dtype", "x" * 5000],
        ["--" + "x" * 5000],
        ["x" * 5000],
        ["--min-pixels", "9" * 4000, "--max-pixels", "8"],
        ["--revision", "x" * 5000],
    ],
)
def test_long_value_is_cut_in_the_message(argv: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings(argv, {})
    assert len(str(caught.value)) <= 403
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "variable", "expected"),
    [
        ([], "", None),
        (["--cudagraph-mm-encoder"], "", True),
        (["--cudagraph-mm-encoder=true"], "", True),
        (["--cudagraph-mm-encoder=false"], "", False),
        (["--cudagraph-mm-encoder", "false"], "", False),
        (["--cudagraph-mm-encoder", "--port", "1"], "", True),
        (["--no-cudagraph-mm-encoder"], "", False),
        (["--no_cudagraph_mm_encoder"], "true", False),
        (["--cudagraph_mm_encoder=1"], "false", True),
        (["--no-cudagraph-mm-encoder", "--cudagraph-mm-encoder"], "", True),
        ([], "true", True),
        ([], "1", True),
        ([], "false", False),
        ([], "0", False),
        ([], "False", False),
    ],
)
def test_switch_can_be_written_in_several_ways(argv: list[str], variable: str, expected: bool | None) -> None:
    settings = parse_settings(argv, {"VISION_SIDECAR_CUDAGRAPH_MM_ENCODER": variable})
    assert settings.cudagraph_mm_encoder is expected


@pytest.mark.parametrize(
    ("text", "budgets"), [("", ()), (" ", ()), ("64", (64,)), ("64, 128 ,4096", (64, 128, 4096))]
)
def test_list_is_separated_by_commas(text: str, budgets: tuple[int, ...]) -> None:
    assert parse_settings([f"--encoder-cudagraph-token-budgets={text}"], {}) == Settings(
        encoder_cudagraph_token_budgets=budgets
    )


def test_help_explains_every_flag_with_default_and_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        parse_settings(["--help"], {})
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in Settings.model_fields.items():
        assert "--" + name.replace("_", "-") in text
        assert f"({ENV_PREFIX}{name.upper()})" in text
        assert field.description is not None
        assert " ".join(field.description.split()) in text
    assert "largest request body in bytes [67108864]" in text
    assert "[the checkpoint's]" in text
    assert "--no-cudagraph-mm-encoder the same as --cudagraph-mm-encoder=false" in text
    assert "to try the service in a browser [true]" in text
    assert "--no-page the same as --page=false" in text
    assert "[()]" not in text
    assert "None" not in text
    assert "--max_body_bytes" not in text
    assert "--no_cudagraph" not in text

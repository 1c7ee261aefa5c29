"""Defaults of the settings, and settings that contradict each other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from models import CudaGraphSettings
from service.config.arguments import SettingsError, parse_settings
from service.config.settings import Settings
from service.images.image_file import MAX_PIXELS_SUPPORTED
from tests.support.app import only

DEFAULTS: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 8080,
    "api_keys": (),
    "api_keys_file": None,
    "page": True,
    "cors_allow_origins": (),
    "log_level": "info",
    "log_format": "text",
    "model": "demo",
    "served_model_name": None,
    "revision": None,
    "dtype": "auto",
    "device": "auto",
    "data_parallel_size": 1,
    "mm_encoder_attn_backend": "auto",
    "cudagraph_mm_encoder": None,
    "encoder_cudagraph_token_budgets": (),
    "encoder_cudagraph_budget_steps": CudaGraphSettings().budget_steps,
    "encoder_cudagraph_max_images_per_batch": 0,
    "min_pixels": None,
    "max_pixels": None,
    "max_batch_tokens": 16_384,
    "max_wait_ms": 0.0,
    "max_queue_tokens": 131_072,
    "max_inflight_bytes": 512 * 2**20,
    "max_body_bytes": 67_108_864,
    "max_image_bytes": 20_971_520,
    "max_image_pixels": 67_108_864,
    "max_images_per_request": 32,
    "max_request_tokens": 65_536,
    "body_timeout_s": 30.0,
    "request_timeout_s": 30.0,
    "device_timeout_s": 60.0,
    "decode_threads": len(os.sched_getaffinity(0)),
    "api_server_count": 0,
    "allowed_media_domains": (),
    "allowed_media_networks": (),
    "media_timeout_s": 5.0,
    "handoff_dir": None,
    "handoff_bytes": 8 * 2**30,
    "handoff_lease_s": 120.0,
    "cache_bytes": 256 * 2**20,
    "llm_url": None,
    "llm_api_key_file": None,
    "llm_timeout_s": 600.0,
    "shutdown_delay_s": 0.0,
    "shutdown_grace_s": 35.0,
}


def test_defaults() -> None:
    assert parse_settings([], {}).model_dump() == DEFAULTS


def test_largest_pixel_limit_is_that_of_the_decoder() -> None:
    assert Settings(max_image_pixels=MAX_PIXELS_SUPPORTED).max_image_pixels == MAX_PIXELS_SUPPORTED
    with pytest.raises(ValidationError):
        Settings(max_image_pixels=MAX_PIXELS_SUPPORTED + 1)


LLM = ["--handoff-dir", "/dev/shm/tokens", "--llm-url", "http://llm:8000"]
BUDGETS = ["--encoder-cudagraph-token-budgets", "64,128"]
STEPS = ["--encoder-cudagraph-budget-steps", "8"]
MAX_IMAGES = ["--encoder-cudagraph-max-images-per-batch", "4"]
ON, OFF = ["--cudagraph-mm-encoder"], ["--no-cudagraph-mm-encoder"]
CPU = ["--device", "cpu"]
SDPA = ["--mm-encoder-attn-backend", "TORCH_SDPA"]


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--max-body-bytes", "5"], ["--max-image-bytes 20971520", "--max-body-bytes 5"]),
        (["--max-inflight-bytes", "9"], ["--max-body-bytes 67108864", "--max-inflight-bytes 9"]),
        (["--request-timeout-s", "35.5"], ["--request-timeout-s 35.5", "--shutdown-grace-s 35"]),
        (["--shutdown-grace-s", "29"], ["--request-timeout-s 30", "--shutdown-grace-s 29"]),
        (["--min-pixels", "9", "--max-pixels", "8"], ["--min-pixels 9", "--max-pixels 8"]),
        (["--revision", "v1"], ["--revision v1", "--model", "demo"]),
        (["--revision", "v1", "--model", "./folder"], ["--revision v1", "--model", "./folder"]),
        (["--data-parallel-size", "2", "--device", "cuda:0"], ["--data-parallel-size 2", "--device cuda:0"]),
        (["--allowed-media-networks", "10.0.0.0/8"], ["--allowed-media-networks", "--allowed-media-domains"]),
        (["--llm-url", "http://llm"], ["--llm-url", "--handoff-dir"]),
        (["--llm-timeout-s", "1"], ["--llm-timeout-s", "--llm-url"]),
        (["--llm-api-key-file", "/no/such/file"], ["--llm-api-key-file", "--llm-url"]),
        ([*LLM, "--llm-api-key-file", "/no/such/file"], ["--llm-api-key-file", "No such file"]),
        (["--api-keys-file", "/no/such/file"], ["--api-keys-file", "/no/such/file", "No such file"]),
        ([*BUDGETS, *OFF], [BUDGETS[0], "--cudagraph-mm-encoder false"]),
        ([*STEPS, *OFF], [STEPS[0], "--cudagraph-mm-encoder false"]),
        ([*MAX_IMAGES, *OFF], [MAX_IMAGES[0], "--cudagraph-mm-encoder false"]),
        ([*ON, *CPU], [ON[0], "--device cpu"]),
        ([*BUDGETS, *CPU], [BUDGETS[0], "--device cpu"]),
        ([*STEPS, *CPU], [STEPS[0], "--device cpu"]),
        ([*ON, *SDPA], [ON[0], "--mm-encoder-attn-backend TORCH_SDPA"]),
        ([*MAX_IMAGES, *SDPA], [MAX_IMAGES[0], "--mm-encoder-attn-backend TORCH_SDPA"]),
        ([*BUDGETS, *STEPS], [BUDGETS[0], STEPS[0]]),
        ([*BUDGETS, MAX_IMAGES[0], "65"], [f"{MAX_IMAGES[0]} 65", "smallest", BUDGETS[0], "64"]),
    ],
)
def test_contradiction_is_one_line_that_names_both_settings(argv: list[str], parts: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings(argv, {})
    assert "\n" not in str(caught.value)
    for text in parts:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    "argv",
    [
        [*OFF, *CPU, *SDPA],
        [*CPU, *SDPA, "--data-parallel-size", "4"],
        [*ON, *BUDGETS, MAX_IMAGES[0], "64"],
        [*ON, *STEPS, *MAX_IMAGES, "--mm-encoder-attn-backend", "FLASH_ATTN_4", "--data-parallel-size", "8"],
        ["--data-parallel-size", "1", "--device", "cuda:1"],
        ["--data-parallel-size", "2", "--device", "cuda"],
        [*OFF, "--encoder-cudagraph-token-budgets", "", MAX_IMAGES[0], "0"],
    ],
)
def test_settings_without_contradiction_are_accepted(argv: list[str]) -> None:
    parse_settings(argv, {})


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        ([], None),
        (OFF, None),
        (["--data-parallel-size", "2"], None),
        (ON, "--cudagraph-mm-encoder"),
        (BUDGETS, "--encoder-cudagraph-token-budgets"),
        (STEPS, "--encoder-cudagraph-budget-steps"),
        (MAX_IMAGES, "--encoder-cudagraph-max-images-per-batch"),
    ],
)
def test_flag_that_asks_for_graphs_is_named(argv: list[str], flag: str | None) -> None:
    assert parse_settings(argv, {}).asks_for_graphs == flag


def test_changed_setting_leaves_the_others_unset(settings: Settings) -> None:
    changed = only(settings, encoder_cudagraph_token_budgets=[64])
    assert changed.encoder_cudagraph_token_budgets == (64,)


def test_equal_limits_are_not_a_contradiction() -> None:
    limits = ["--max-inflight-bytes=7", "--max-body-bytes=7", "--max-image-bytes=7"]
    times = ["--request-timeout-s=5", "--shutdown-grace-s=5"]
    settings = parse_settings([*limits, *times, "--min-pixels=5", "--max-pixels=5"], {})
    assert settings.max_body_bytes == settings.max_image_bytes == settings.max_inflight_bytes
    assert settings.request_timeout_s == settings.shutdown_grace_s


@pytest.mark.parametrize("name", ["max_wait_ms", "shutdown_delay_s"])
@pytest.mark.parametrize("value", ["-1", "nan", "inf", "-0.001"])
def test_times_that_may_be_zero_are_finite_and_not_negative(name: str, value: str) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(SettingsError, match=flag):
        parse_settings([f"{flag}={value}"], {})
    assert getattr(parse_settings([f"{flag}=0"], {}), name) == 0


@pytest.mark.parametrize(
    "name", ["body_timeout_s", "request_timeout_s", "device_timeout_s", "shutdown_grace_s", "llm_timeout_s"]
)
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_timeouts_are_finite_and_positive(name: str, value: str) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(SettingsError, match=flag):
        parse_settings([f"{flag}={value}"], {})


def keys_of(settings: Settings) -> list[str]:
    return [key.get_secret_value() for key in settings.accepted_keys]


def test_keys_of_list_and_file_are_accepted_and_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\ufeff# key of a client\n\n  sk-file+/=#\r\nother\n \n")
    assert keys_of(Settings()) == []
    settings = parse_settings(["--api-keys", "sk-1, two"], {})
    assert keys_of(settings) == ["sk-1", "two"]
    settings = parse_settings(["--api-keys-file", str(file)], {"VISION_SIDECAR_API_KEYS": "sk-1"})
    assert keys_of(settings) == ["sk-1", "sk-file+/=#", "other"]
    assert keys_of(only(settings, port=1)) == keys_of(settings)
    for shown in (repr(settings), str(settings), str(settings.model_dump()), settings.model_dump_json()):
        assert "sk-1" not in shown
        assert "sk-file" not in shown


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no key"),
        (b"# none\n\n", "has no key"),
        (b"fine\nsecret key\n", "line 2"),
        (b"secret,key\n", "line 1"),
        (b"fine\n\nsecret\xc3\xa9\n", "line 3"),
        (b"secret\x00\n", "line 1"),
        (b"secret\xff\n", "not UTF-8"),
    ],
)
def test_key_file_with_another_content_is_refused_and_not_shown(
    content: bytes, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=message) as caught:
        parse_settings(["--api-keys-file", str(file)], {})
    assert "secret" not in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        ("https://llm.example.org/team/", "https://llm.example.org/team"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
    ],
)
def test_url_of_an_llm_server_may_have_a_path(url: str, expected: str) -> None:
    assert parse_settings([*LLM[:2], "--llm-url", url], {}).llm_url == expected


@pytest.mark.parametrize(
    "url",
    [
        *("", "localhost:8000", "ftp://llm", "http://", "http://llm:x", "http://llm:0", "http://llm:70000"),
        *(
            "http://llm/v1",
            "http://llm/v1/",
            "http://llm?a",
            "http://llm#a",
            "http://user@llm",
            "http://l lm",
        ),
        *("http://[::1", "http://bücher.example"),
    ],
)
def test_another_url_of_an_llm_server_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="--llm-url.*without /v1"):
        parse_settings([*LLM[:2], "--llm-url", url], {})


def test_llm_key_is_the_only_one_in_its_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("# of the LLM server\nsk-llm\n")
    key = parse_settings([*LLM, "--llm-api-key-file", str(file)], {}).llm_api_key
    assert key is not None
    assert key.get_secret_value() == "sk-llm"
    file.write_text("sk-llm\nsk-other\n")
    with pytest.raises(SettingsError, match="more than one key") as caught:
        parse_settings([*LLM, "--llm-api-key-file", str(file)], {})
    assert "sk-" not in str(caught.value)


def test_hosts_of_image_urls_are_kept_in_canonical_spelling() -> None:
    settings = parse_settings(
        ["--allowed-media-domains", "Images.Example.org,BÜCHER.example,10.0.0.1,[2001:DB8::1]"], {}
    )
    assert settings.allowed_media_domains == (
        "images.example.org", "xn--bcher-kva.example", "10.0.0.1", "2001:db8::1",
    )  # fmt: skip


def test_settings_are_immutable() -> None:
    with pytest.raises(ValidationError):
        setattr(parse_settings([], {}), "port", 1)  # noqa: B010 - mypy knows that it is frozen


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
def test_served_name_is_hub_id_or_name_of_folder(model: str, name: str) -> None:
    assert parse_settings(["--model", model], {}).served_name == name


def test_served_name_of_relative_folder_has_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_settings(["--model", "owner/name"], {}).served_name == "name"
    assert parse_settings(["--model", "."], {}).served_name == tmp_path.name


def test_served_name_can_be_set() -> None:
    assert parse_settings(["--served-model-name", "eyes", "--model", "/a/b"], {}).served_name == "eyes"

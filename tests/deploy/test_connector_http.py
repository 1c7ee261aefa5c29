"""vLLM's connector with a vision-sidecar on another host: a stand-in that the test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tests.support.llm_server import Asked, LlmServer, answer
from tests.support.vllm_connector import UUID, WIDTH, Chat, Feature, Scheduler, load, open_tokens

NUM_TOKENS = 6
MakeScheduler = Callable[..., Scheduler]


@pytest.fixture
def sidecar() -> Iterator[LlmServer]:
    with LlmServer() as server:
        yield server


def chat(uuid: str = UUID, name: str = "a") -> Chat:
    return Chat(name, [Feature(uuid, NUM_TOKENS)])


def file_of(tokens: torch.Tensor) -> bytes:
    return save({"tokens": tokens}, {"grid_thw": "[1,4,6]"})


def test_tokens_are_fetched_with_the_key(
    connector: Any,
    scheduler: MakeScheduler,
    sidecar: LlmServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    tokens = torch.randn(NUM_TOKENS, WIDTH)
    sidecar.script = answer(200, file_of(tokens))
    key = tmp_path / "key"
    key.write_text("secret\n")
    vllm = scheduler(url=sidecar.url + "/prefix/", api_key_file=str(key))
    assert torch.equal(load(connector, vllm.until(chat()))[UUID], tokens)
    asked = sidecar.last()
    assert asked.line == f"GET /prefix/handoff/{UUID} HTTP/1.1"
    assert asked.header("authorization") == ["Bearer secret"]
    key.write_text("new")
    other = "vs1-" + "1" * 64
    vllm.until(chat(other, name="b"))
    assert sidecar.last().header("authorization") == ["Bearer new"]


def test_image_of_several_requests_is_fetched_once(scheduler: MakeScheduler, sidecar: LlmServer) -> None:
    sidecar.script = answer(200, file_of(torch.randn(NUM_TOKENS, WIDTH)))
    vllm = scheduler(url=sidecar.url)
    vllm.until(*(chat(name=str(number)) for number in range(5)))
    assert len(sidecar.asked) == 1


async def hang(asked: Asked) -> None:
    await asyncio.sleep(60)


async def hang_in_the_body(asked: Asked) -> None:
    asked.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n12345")
    await asyncio.sleep(60)


async def drip(asked: Asked) -> None:
    asked.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n")
    for _ in range(100):
        asked.write(b"1")
        await asyncio.sleep(0.1)


async def endless(asked: Asked) -> None:
    asked.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while not asked.has_left.is_set():
        asked.write(bytes(2**16))
        await asked.drain()
        await asyncio.sleep(0)


async def no_http(asked: Asked) -> None:
    asked.write(b"SSH-2.0\r\n\r\n")
    asked.close()


async def cut_off(asked: Asked) -> None:
    asked.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n12345")
    asked.close()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (answer(404), "not_found"),
        (answer(401), "other"),
        (answer(500), "other"),
        (answer(206, file_of(torch.zeros(NUM_TOKENS, WIDTH))), "other"),
        (answer(302, b"", "Location: http://127.0.0.1:9/"), "other"),
        (answer(200, b"text"), "misfit"),
        (answer(200, file_of(torch.zeros(NUM_TOKENS + 1, WIDTH))), "misfit"),
        (endless, "misfit"),
        (hang, "timeout"),
        (hang_in_the_body, "timeout"),
        (drip, "timeout"),
        (no_http, "unreachable"),
        (cut_off, "unreachable"),
    ],
)
def test_failing_server_fails_the_request(
    scheduler: MakeScheduler, sidecar: LlmServer, script: Any, reason: str
) -> None:
    sidecar.script = script
    vllm = scheduler(url=sidecar.url, timeout_s=0.5)
    assert vllm.failure(chat()) == reason
    assert len(sidecar.asked) == 1
    assert open_tokens() == 0


def test_server_that_is_down_or_a_key_that_is_gone_fails_the_request(
    scheduler: MakeScheduler, sidecar: LlmServer, tmp_path: Path
) -> None:
    assert scheduler(url="http://127.0.0.1:9").failure(chat()) == "unreachable"
    vllm = scheduler(url=sidecar.url, api_key_file=str(tmp_path / "key"))
    assert vllm.failure(chat()) == "other"
    assert sidecar.asked == []


@pytest.mark.parametrize("uuid", ["../healthz", UUID + "?a", UUID + "/..", UUID + "\r\nx: y"])
def test_other_uuids_reach_no_url(scheduler: MakeScheduler, sidecar: LlmServer, uuid: str) -> None:
    assert scheduler(url=sidecar.url).failure(chat(uuid)) == "invalid_uuid"
    assert sidecar.asked == []

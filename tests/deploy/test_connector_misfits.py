"""What vLLM's connector refuses: uuids, files, grids and data of requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.vllm_connector import (
    NUM_TOKENS,
    UUID,
    WIDTH,
    Scheduler,
    Value,
    chat,
    load,
    open_tokens,
    store,
)

OTHER = "vs1-" + "f" * 64
SIZE = NUM_TOKENS * WIDTH * 4
MakeScheduler = Callable[..., Scheduler]


@pytest.mark.parametrize(
    "uuid",
    ["", "../x", "vs1-" + "0" * 63, "vs1-" + "0" * 65, UUID.upper(), UUID + "\n", "x" * 300, f"a/../{UUID}"],
)
def test_other_uuids_reach_no_path(scheduler: MakeScheduler, tmp_path: Path, uuid: str) -> None:
    (tmp_path / "a").mkdir()
    store(tmp_path)
    store(tmp_path.parent, "x")
    assert scheduler(dir=str(tmp_path)).failure(chat(uuid)) == "invalid_uuid"


def test_request_with_another_grid_fails_alone(
    connector: Any, scheduler: MakeScheduler, tmp_path: Path
) -> None:
    tokens = store(tmp_path)
    vllm = scheduler(dir=str(tmp_path))
    loads = vllm.until(chat(num_tokens=7, name="wrong"), chat(name="right"))
    assert vllm.connector.take_unavailable_requests() == {"wrong"}
    assert torch.equal(load(connector, loads)[UUID], tokens)


def header(**changes: object) -> bytes:
    entry = {"dtype": "F32", "shape": [NUM_TOKENS, WIDTH], "data_offsets": [0, SIZE], **changes}
    text = json.dumps({"tokens": entry, "__metadata__": {"grid_thw": "[1,4,6]"}}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 400,
        b"\xff" * 400,
        (2).to_bytes(8, "little") + b"[]" + bytes(SIZE),
        (2).to_bytes(8, "little") + b"{}" + bytes(SIZE),
        (40_000).to_bytes(8, "little") + b"[" * 40_000 + bytes(SIZE),
        header().replace(b'"[1,4,6]"', b'"[1,4,6}"') + bytes(SIZE),
        header().replace(b"grid_thw", b"grid_hwt") + bytes(SIZE),
        header() + bytes(SIZE - 1),
        header() + bytes(SIZE + 1),
        header(dtype="I8") + bytes(SIZE),
        header(dtype="BF16") + bytes(SIZE),
        header(shape=[NUM_TOKENS]) + bytes(SIZE),
        header(shape=[NUM_TOKENS, WIDTH, 1]) + bytes(SIZE),
        header(shape=[-NUM_TOKENS, -WIDTH]) + bytes(SIZE),
        header(shape=[WIDTH, NUM_TOKENS]) + bytes(SIZE),
        header(shape=None) + bytes(SIZE),
        header(data_offsets=[1, SIZE + 1]) + bytes(SIZE + 1),
        header(data_offsets=[-4, SIZE - 4]) + bytes(SIZE),
    ],
)
def test_file_that_does_not_fit_fails_the_request(
    scheduler: MakeScheduler, tmp_path: Path, data: bytes
) -> None:
    (tmp_path / f"{UUID}.safetensors").write_bytes(data)
    assert scheduler(dir=str(tmp_path)).failure(chat()) == "misfit"
    assert open_tokens() == 0


def test_links_and_folders_are_not_followed(scheduler: MakeScheduler, tmp_path: Path) -> None:
    store(tmp_path, "elsewhere")
    (tmp_path / f"{UUID}.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    (tmp_path / f"{OTHER}.safetensors").mkdir()
    vllm = scheduler(dir=str(tmp_path))
    assert vllm.failure(chat()) == "other"
    assert vllm.failure(chat(OTHER)) == "other"


@pytest.mark.parametrize(
    ("uuid", "data", "reason"),
    [
        ("any", {"image_embeds": Value(torch.ones(NUM_TOKENS - 1, WIDTH))}, "misfit"),
        ("any", {"image_embeds": Value(torch.ones(NUM_TOKENS, WIDTH + 1))}, "misfit"),
        ("any", {"image_embeds": Value(torch.ones(1, NUM_TOKENS, WIDTH))}, "misfit"),
        # vLLM would keep them under the uuid, and answer later chats about that image from them.
        (UUID, {"image_embeds": Value(torch.ones(NUM_TOKENS, WIDTH))}, "invalid_uuid"),
        (UUID, {"pixel_values": Value(torch.ones(1))}, "invalid_uuid"),
        (UUID, {"pixel_values_videos": Value(torch.ones(1))}, "invalid_uuid"),
    ],
)
def test_data_that_would_harm_others_fails_the_request(
    scheduler: MakeScheduler, tmp_path: Path, uuid: str, data: Any, reason: str
) -> None:
    store(tmp_path)
    assert scheduler(dir=str(tmp_path)).failure(chat(uuid, data=data)) == reason


@pytest.mark.parametrize("grid", [[1, 6, 4], [1, 2, 12], [2, 2, 6]])
def test_another_grid_of_as_many_tokens_fails_its_request_alone(
    connector: Any, scheduler: MakeScheduler, tmp_path: Path, grid: list[int]
) -> None:
    tokens = store(tmp_path)
    vllm = scheduler(dir=str(tmp_path))
    wrong = chat(name="wrong", data={"image_grid_thw": Value(torch.tensor([grid]))})
    loads = vllm.until(chat(name="right"), wrong)
    assert vllm.connector.take_unavailable_requests() == {"wrong"}
    assert torch.equal(load(connector, loads)[UUID], tokens)
    # vLLM may have computed the image for another request. What follows it would still be wrong.
    vllm.connector.request_finished(wrong)
    assert not vllm.connector.ensure_cache_available(wrong, NUM_TOKENS)
    assert vllm.connector.ensure_cache_available(chat(name="right"), NUM_TOKENS)
    assert vllm.connector.take_unavailable_requests() == {"wrong"}


def test_any_fault_fails_the_request_and_not_the_engine(
    connector: Any, scheduler: MakeScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: int) -> Any:
        raise MemoryError("no memory")

    store(tmp_path)
    monkeypatch.setattr(connector.Tokens, "read", fail)
    assert scheduler(dir=str(tmp_path)).failure(chat()) == "other"
    assert open_tokens() == 0

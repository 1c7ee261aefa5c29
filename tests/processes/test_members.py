from __future__ import annotations

import os
from typing import Any, cast

import pytest

from service.processes.supervisor.members import DeviceMember
from service.processes.wire.messages import DeviceLoaded, EncoderFacts, Fault
from tests.support.app import FakeEncoder

LOADED = DeviceLoaded(EncoderFacts.of(cast(Any, FakeEncoder())), 2**20)


def device() -> DeviceMember:
    return DeviceMember(
        name="the process of cpu", process=cast(Any, None), link=cast(Any, None), device="cpu"
    )


def test_device_has_memory_for_each_api_server() -> None:
    member = device()
    files = [os.memfd_create("memory") for _ in range(2)]
    member.take_loaded(LOADED, files, 2)
    assert (member.loaded, member.memories) == (LOADED, files)
    member.close_memories()
    for file in files:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)


@pytest.mark.parametrize("num_files", [0, 1])
def test_device_with_missing_memory_cannot_serve_and_leaves_no_file(num_files: int) -> None:
    member = device()
    files = [os.memfd_create("memory") for _ in range(num_files)]
    member.take_loaded(LOADED, files, 2)
    assert member.loaded is not None
    assert isinstance(member.loaded.encoder, Fault)
    assert "limit on open files" in member.loaded.encoder.message
    assert member.memories == []
    for file in files:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)

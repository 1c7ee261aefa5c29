"""The file of one image's tokens: its bytes, its name, its lease."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from models import write_tokens
from service.handoff.entry import Entry
from service.handoff.token_file import TokenFile, file_bytes, read_entry

UUID = "vs1-" + "0123456789abcdef" * 4


def sink(folder: Path, lease_s: float = 60.0) -> TokenFile:
    return TokenFile(str(folder), UUID, (1, 4, 6), "f" * 64, lease_s)


def claim(folder: Path) -> None:
    (folder / f"{UUID}.claim").touch()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(folder: Path, rows: torch.Tensor, *, alone: bool = False) -> None:
    """Writes a file as a batch does."""
    num_tokens, width = rows.shape
    writing = sink(folder).open((num_tokens, width), rows.dtype)
    try:
        writing.allocate(alone=alone)
        write_tokens([(writing, rows)])
    finally:
        writing.discard()


def written(folder: Path, rows: torch.Tensor, *, alone: bool = False) -> Path:
    claim(folder)
    write(folder, rows, alone=alone)
    return folder / f"{UUID}.safetensors"


def entry_of(path: Path) -> Entry:
    file = os.open(path, os.O_RDONLY)
    try:
        return read_entry(file, UUID)
    finally:
        os.close(file)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_safetensors_reads_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    rows = torch.randn(6, 12).to(dtype)
    path = written(tmp_path, rows)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"grid_thw": "[1,4,6]", "fingerprint": "f" * 64}
        assert file.keys() == ["tokens"]
        tokens = file.get_tensor("tokens")
    assert tokens.dtype == dtype
    assert torch.equal(tokens.view(torch.uint8), rows.view(torch.uint8))
    name = str(dtype).removeprefix("torch.")
    size = file_bytes(6, 12, dtype.itemsize)
    assert path.stat().st_size == size
    assert entry_of(path) == Entry(UUID, (1, 4, 6), 6, 12, name, size)


@pytest.mark.parametrize("alone", [False, True])
def test_file_of_several_parts_is_whole(tmp_path: Path, alone: bool) -> None:
    rows = torch.arange(3 * 2**20, dtype=torch.float32).reshape(3, 2**20)  # 12 MiB
    with safe_open(written(tmp_path, rows, alone=alone), "pt") as file:
        assert torch.equal(file.get_tensor("tokens"), rows)


def test_mode_does_not_depend_on_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        assert written(tmp_path, torch.ones(2, 2)).stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_new_file_is_leased(tmp_path: Path) -> None:
    facts = written(tmp_path, torch.ones(2, 2)).stat()
    assert 50 < facts.st_mtime - time.time() <= 60
    assert abs(facts.st_atime - time.time()) < 10


def test_file_has_its_name_only_once_it_is_whole(tmp_path: Path) -> None:
    claim(tmp_path)
    rows = torch.ones(2, 2)
    writing = sink(tmp_path).open((2, 2), rows.dtype)
    for part in writing.parts(rows):
        assert f"{UUID}.safetensors" not in names(tmp_path)
        part()
    writing.commit()
    assert names(tmp_path) == [f"{UUID}.claim", f"{UUID}.safetensors"]
    writing.discard()
    assert names(tmp_path) == [f"{UUID}.claim", f"{UUID}.safetensors"]


def test_file_that_nobody_claims_any_more_is_dropped(tmp_path: Path) -> None:
    write(tmp_path, torch.ones(2, 2))
    assert names(tmp_path) == []


@pytest.mark.parametrize("alone", [False, True])
def test_memory_is_allocated_while_the_tokens_are_not_there_yet(tmp_path: Path, alone: bool) -> None:
    writing = sink(tmp_path).open((64, 1024), torch.float32)
    writing.allocate(alone=alone)
    [part] = tmp_path.iterdir()
    assert part.stat().st_blocks * 512 >= 64 * 1024 * 4
    assert (str(part) in Path("/proc/self/maps").read_text()) == alone
    writing.discard()
    writing.allocate(alone=alone)  # a batch may fail before this runs
    assert str(part) not in Path("/proc/self/maps").read_text()
    assert names(tmp_path) == []


def test_memory_that_is_allocated_too_late_is_not_mapped(tmp_path: Path) -> None:
    claim(tmp_path)
    rows = torch.ones(64, 1024)
    writing = sink(tmp_path).open((64, 1024), rows.dtype)
    parts = writing.parts(rows)
    writing.allocate(alone=True)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    for part in parts:
        part()
    writing.commit()
    with safe_open(tmp_path / f"{UUID}.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("tokens"), rows)


def test_file_whose_part_fails_is_dropped_and_the_error_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(tmp_path)

    def full(file: int, data: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, torch.ones(2, 2))
    assert names(tmp_path) == [f"{UUID}.claim"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:100], offset))
    rows = torch.randn(50, 7)
    with safe_open(written(tmp_path, rows), "pt") as file:
        assert torch.equal(file.get_tensor("tokens"), rows)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:7],
        lambda data: data[:-1],
        lambda data: data + b"0",
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:8] + b"[" * 504 + data[512:],
        lambda data: data.replace(b"F32", b"I64"),
        lambda data: data.replace(b"[1,4,6]", b"[1,4]  "),
        lambda data: data.replace(b"[2,2]", b'"abc"'),
        lambda data: data.replace(b"tokens", b"xokens"),
    ],
)
def test_file_that_is_not_ours_or_not_whole_is_an_error(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = written(tmp_path, torch.ones(2, 2))
    data = path.read_bytes()
    damaged = damage(data)
    assert damaged != data
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="a file of tokens"):
        entry_of(path)

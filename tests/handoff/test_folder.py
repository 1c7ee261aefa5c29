"""The folder of tokens at start: what is refused, what is kept, and how much room there is."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from service.handoff.folder import FolderError, _file_system, open_folder, scan
from service.handoff.ledger import Ledger

UUIDS = [f"vs1-{digit * 64}" for digit in "0123456789"]


def add(folder: Path, uuid: str, num_bytes: int = 100, *, used_at: float = 0.0) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{uuid}.safetensors"
    path.write_bytes(b"0" * num_bytes)
    os.utime(path, (used_at, used_at))
    return path


def kept(folder: Path) -> set[str]:
    return {file.uuid for file in scan(folder)}


def test_missing_folder_is_created_for_the_group_to_read(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "tokens"
    with open_folder(folder, 1000):
        assert folder.stat().st_mode & 0o777 == 0o750
        ledger = Ledger(folder)
        assert (ledger.limit_bytes, ledger.used_bytes, ledger.num_entries) == (1000, 0, 0)


def test_earlier_entries_are_kept_as_far_as_they_fit_the_last_used_first(tmp_path: Path) -> None:
    for index, uuid in enumerate(UUIDS):
        add(tmp_path, uuid, used_at=index)
    with open_folder(tmp_path, 450):
        assert kept(tmp_path) == set(UUIDS[-4:])
        ledger = Ledger(tmp_path)
        assert (ledger.used_bytes, ledger.num_entries) == (400, 4)


def test_unfinished_and_empty_files_are_dropped(tmp_path: Path) -> None:
    whole = add(tmp_path, UUIDS[0])
    add(tmp_path, UUIDS[1], 0)
    (tmp_path / f"{UUIDS[2]}.claim").touch()
    (tmp_path / f"{UUIDS[2]}.17-3.part").write_bytes(b"half")
    with open_folder(tmp_path, 1000):
        assert {path.name for path in tmp_path.iterdir()} == {whole.name, ".lock", ".ledger"}


@pytest.mark.parametrize(
    "name",
    [
        "photo.jpg",
        ".hidden",
        f"{UUIDS[0]}.safetensors.bak",
        f"{UUIDS[0]}",
        f"x{UUIDS[0]}.safetensors",
        "a\nb",
    ],
)
def test_folder_with_files_of_others_is_refused_and_stays_as_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"precious")
    own = add(tmp_path, UUIDS[0], 0)
    with pytest.raises(FolderError, match="files of others") as caught:
        open_folder(tmp_path, 1000)
    assert "\n" not in str(caught.value)
    assert (tmp_path / name).read_bytes() == b"precious"
    assert own.exists()


def test_link_or_folder_with_the_name_of_an_entry_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    for make in (os.symlink, lambda source, path: os.mkdir(path)):
        folder = tmp_path / "tokens"
        folder.mkdir(exist_ok=True)
        path = folder / f"{UUIDS[0]}.safetensors"
        make(target, path)
        with pytest.raises(FolderError, match="files of others"):
            open_folder(folder, 1000)
        path.rmdir() if path.is_dir() else path.unlink()
    assert target.read_bytes() == b"precious"


def test_lock_or_ledger_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    for name in (".lock", ".ledger"):
        folder = tmp_path / name[1:]
        folder.mkdir()
        (folder / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(FolderError):
            open_folder(folder, 1000)
        assert not (tmp_path / "elsewhere").exists()


def test_folder_of_another_server_is_refused_until_that_ends(tmp_path: Path) -> None:
    with open_folder(tmp_path, 1000):
        add(tmp_path, UUIDS[0])
        with pytest.raises(FolderError, match="in use by another server"):
            open_folder(tmp_path, 1000)
        assert kept(tmp_path) == {UUIDS[0]}
    with open_folder(tmp_path, 1000):
        assert kept(tmp_path) == {UUIDS[0]}


def test_path_that_is_no_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "tokens"):
        with pytest.raises(FolderError, match="cannot be used: "):
            open_folder(path, 1000)


def test_limit_shrinks_to_the_room_less_a_spare_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_folder(tmp_path, 2**60):
        limit = Ledger(tmp_path).limit_bytes
    system = os.statvfs(tmp_path)
    # Less than 15/16: files take whole pages. The room changes while other programs write.
    assert 0.85 < limit / (system.f_bavail * system.f_frsize) < 0.98
    assert f"has room for {limit} bytes only" in caplog.text


def test_folder_on_a_disk_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    is_memory = _file_system(tmp_path) in ("tmpfs", "ramfs")
    with open_folder(tmp_path, 1000):
        assert ("not in memory" in caplog.text) is not is_memory


def test_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    inner = tmp_path / "inner"
    inner.mkdir()
    mounts.write_text(
        f"a / ext4 rw 0 0\nb {tmp_path} xfs rw 0 0\nc {inner} tmpfs rw 0 0\nd {tmp_path}x nfs rw 0 0\n-\n"
    )
    assert _file_system(inner, mounts) == "tmpfs"
    assert _file_system(tmp_path, mounts) == "xfs"
    assert _file_system(Path("/"), mounts) == "ext4"
    assert _file_system(inner, tmp_path / "missing") is None

"""Opens the folder of tokens when the server starts: whose it is, what is kept, how much room there is.

Knows files only, and imports nothing slow: a bad folder is reported at once.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from service.config.settings import Settings
from service.handoff import ledger
from service.handoff.entry import CLAIM_SUFFIX, PART_SUFFIX, SUFFIX, UUID

logger = logging.getLogger(__name__)

_LOCK = ".lock"
_OWN = re.compile(rf"({UUID.pattern})(?P<suffix>{re.escape(SUFFIX)}|\.claim|\.[0-9]+-[0-9]+\.part)")
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_SPARE_SHARE = 16  # of the room, one part in so many stays free: files take whole pages of the file system


class FolderError(Exception):
    """The folder cannot be used. The message is one line for the operator."""


@dataclass(frozen=True)
class StoredFile:
    """A file in the folder with the tokens of an image, or a claim: a promise to write them."""

    path: str
    uuid: str
    num_bytes: int
    used_at: float  # seconds since 1970
    leased_until: float

    @property
    def is_claim(self) -> bool:
        return self.path.endswith(CLAIM_SUFFIX)


def scan(folder: Path) -> list[StoredFile]:
    """All files of tokens and all claims. Files that end meanwhile may be among them."""
    found = []
    with os.scandir(folder) as items:
        for item in items:
            match = _OWN.fullmatch(item.name)
            if match is None or match["suffix"].endswith(PART_SUFFIX):
                continue
            with suppress(FileNotFoundError):
                facts = item.stat(follow_symlinks=False)
                found.append(StoredFile(item.path, match[1], facts.st_size, facts.st_atime, facts.st_mtime))
    return found


class OpenFolder:
    """The folder while this server has it. No other server can open it."""

    def __init__(self, lock: int) -> None:
        self._lock = lock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Lets another server open the folder. The end of the process does so, too."""
        os.close(self._lock)


def open_folder(folder: Path, limit_bytes: int) -> OpenFolder:
    """Creates the folder if it is missing, takes it, and drops what cannot be used.

    Complete files stay, the most recently used first, as far as they fit. Raises `FolderError`.
    """
    try:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        lock = _take(folder)
        try:
            _check_files(folder)
            _drop_unfinished(folder)
            kept = _drop_oldest(folder, limit_bytes)
            used_bytes = sum(file.num_bytes for file in kept)
            limit_bytes = _limit_to_room(folder, limit_bytes, used_bytes)
            ledger.Ledger.create(
                folder, limit_bytes=limit_bytes, used_bytes=used_bytes, num_entries=len(kept)
            )
        except BaseException:
            os.close(lock)
            raise
    except OSError as error:
        raise FolderError(f"--handoff-dir {folder} cannot be used: {error.strerror or error}") from None
    _warn_of_disk(folder)
    logger.info("handoff-dir %s: %d bytes of earlier tokens, room for %d", folder, used_bytes, limit_bytes)
    return OpenFolder(lock)


def open_handoff_folder(settings: Settings) -> AbstractContextManager[object]:
    """`open_folder` for the settings, if they name a folder. Raises `FolderError`."""
    if settings.handoff_dir is None:
        return nullcontext()
    return open_folder(settings.handoff_dir, settings.handoff_bytes)


def _take(folder: Path) -> int:
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise FolderError(f"--handoff-dir {folder} is in use by another server") from None
    return lock


def _check_files(folder: Path) -> None:
    """Refuses a folder with anything that a server would not have written there."""
    for path in folder.iterdir():
        facts = path.lstat()
        is_own = path.name in (_LOCK, ledger.FILE) or _OWN.fullmatch(path.name)
        if not is_own or not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            raise FolderError(
                f"--handoff-dir {folder} has files of others, such as {ascii(path.name)[:80]}; name a folder "
                "of its own"
            )


def _drop_unfinished(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name.endswith((CLAIM_SUFFIX, PART_SUFFIX)):
            path.unlink()


def _drop_oldest(folder: Path, limit_bytes: int) -> list[StoredFile]:
    """Keeps the files that were used last. Returns them."""
    kept: list[StoredFile] = []
    num_bytes = 0
    for file in sorted(scan(folder), key=lambda file: file.used_at, reverse=True):
        num_bytes += file.num_bytes
        if num_bytes > limit_bytes or not file.num_bytes:
            os.unlink(file.path)
        else:
            kept.append(file)
    return kept


def _limit_to_room(folder: Path, limit_bytes: int, used_bytes: int) -> int:
    """The limit, or what the file system has room for if that is less."""
    system = os.statvfs(folder)
    room = used_bytes + system.f_bavail * system.f_frsize
    room -= room // _SPARE_SHARE
    if room >= limit_bytes:
        return limit_bytes
    logger.warning(
        "handoff-dir %s has room for %d bytes only, not for the %d of --handoff-bytes; enlarge the tmpfs, or "
        "lower the setting",
        folder,
        room,
        limit_bytes,
    )
    return room


def _warn_of_disk(folder: Path) -> None:
    """Tokens on a disk are served, but slowly, and they wear it out."""
    name = _file_system(folder)
    if name is not None and name not in _MEMORY_FILE_SYSTEMS:
        logger.warning("handoff-dir %s is on %s, not in memory (tmpfs): handing over is slow", folder, name)


def _file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """The type of the file system that the folder is on. None if the system does not say."""
    path = folder.resolve()
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return None
    points = [line.split()[1:3] for line in lines if len(line.split()) >= 3]
    found = [(len(point), name) for point, name in points if path.is_relative_to(point)]
    # Of equal mount points, the last one is on top.
    return max(enumerate(found), key=lambda item: (item[1][0], item[0]))[1][1] if found else None


def now() -> float:
    """The time that leases are measured in: seconds since 1970."""
    return time.time()

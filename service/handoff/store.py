"""The store of tokens as one API server uses it: find, claim, reserve, release, delete.

    find ─► no entry: claim ─► reserve room ─► the device writes the file ─► find
               └─► another request has the claim: wait ─► find

The folder itself is the state that all processes share. A file has its name only once it is whole. Its access
time says when it was used last, and its modification time how long it is leased. Knows files, bytes and
leases; nothing of HTTP or of the encoder.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from service.errors import TooLarge, TooManyRequests
from service.handoff.entry import CLAIM_SUFFIX, SUFFIX, UUID, Entry
from service.handoff.folder import StoredFile, now, scan
from service.handoff.ledger import Ledger
from service.handoff.token_file import read_entry
from service.metrics import Metrics

logger = logging.getLogger(__name__)

_MIN_RETRY_AFTER_S, _MAX_RETRY_AFTER_S = 1, 10
_POLL_S = 0.002


class TokenStore:
    """The entries of a folder that `open_folder` has taken for this server. Threads may share it."""

    def __init__(self, folder: Path, lease_s: float, metrics: Metrics) -> None:
        """Raises `OSError` if the folder is not open."""
        self.folder = folder
        self.lease_s = lease_s
        self._metrics = metrics
        self._ledger = Ledger(folder)
        self._reserved: dict[str, int] = {}  # claims of this process → bytes
        self._oldest: deque[StoredFile] = deque()  # to be evicted next, as of the last look at the folder

    # Reading

    def find(self, uuid: str) -> Entry | None:
        """The entry, which is leased from now on. None if there is none."""
        try:
            with self._opened(uuid) as file:
                fcntl.flock(file, fcntl.LOCK_SH)  # an eviction is over, or has not looked at it yet
                time = now()
                os.utime(file, (time, time + self.lease_s))
                return read_entry(file, uuid) if os.fstat(file).st_nlink else None
        except FileNotFoundError:
            return None
        except ValueError as error:  # another process has changed the file
            logger.error("%s%s is dropped: %s", uuid, SUFFIX, error)
            self.delete(uuid)
            return None

    def open(self, uuid: str) -> int:
        """A file to read the entry from, whatever happens to the entry. The caller closes it.

        `uuid` may be any text. Raises `FileNotFoundError`.
        """
        if not UUID.fullmatch(uuid):
            raise FileNotFoundError(uuid)
        return os.open(self._path(uuid), os.O_RDONLY | os.O_NOFOLLOW)

    # Computing

    def claim(self, uuid: str) -> bool:
        """Claims the right to write an entry. False if another request has it, of this process or another."""
        try:
            os.close(os.open(self._claim_path(uuid), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        self._reserved[uuid] = 0
        return True

    def reserve(self, sizes: Sequence[tuple[str, int]]) -> None:
        """Reserves room for entries that are claimed, in bytes, all or none. Evicts others.

        Raises `TooManyRequests` while leased entries take the room, and `TooLarge` if it could never be had.
        """
        num_bytes = sum(size for _, size in sizes)
        ledger = self._ledger
        if num_bytes > ledger.limit_bytes:
            raise TooLarge(
                f"the tokens have {num_bytes} bytes, and the store holds {ledger.limit_bytes}",
                code="too_many_tokens",
            )
        # The memory of a dropped file is freed when it is closed. That takes milliseconds, without the lock.
        with ExitStack() as dropped, ledger.locked():
            if ledger.used_bytes + num_bytes > ledger.limit_bytes:
                self._evict(num_bytes, dropped)
            ledger.used_bytes += num_bytes
            ledger.num_entries += len(sizes)
            for uuid, size in sizes:
                os.truncate(self._claim_path(uuid), size)  # a hole, which takes no memory
                self._reserved[uuid] = size

    def release(self, uuid: str) -> None:
        """Ends a claim. Room that was reserved is free again unless the entry was written."""
        size = self._reserved.pop(uuid)
        with self._ledger.locked():
            if size and not os.path.exists(self._path(uuid)):
                self._forget(size)
            with suppress(FileNotFoundError):
                os.unlink(self._claim_path(uuid))

    async def wait(self, uuids: Iterable[str]) -> None:
        """Waits until a claim of another request has ended. Its process may be another one."""
        paths = [self._claim_path(uuid) for uuid in uuids]
        while all(map(os.path.exists, paths)):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    # Dropping

    def delete(self, uuid: str) -> bool:
        """Drops an entry, leased or not. False if there is none. `uuid` may be any text."""
        if not UUID.fullmatch(uuid):
            return False
        path = self._path(uuid)
        with self._ledger.locked():
            try:
                num_bytes = os.lstat(path).st_size
                os.unlink(path)
            except FileNotFoundError:
                return False
            if not os.path.exists(self._claim_path(uuid)):  # else the room is still reserved
                self._forget(num_bytes)
        return True

    # For the metrics

    @property
    def used_bytes(self) -> int:
        """The bytes of all entries, those that are being written among them."""
        return self._ledger.used_bytes

    @property
    def num_entries(self) -> int:
        """The number of all entries, those that are being written among them."""
        return self._ledger.num_entries

    @property
    def leased_bytes(self) -> int:
        """The bytes of entries that may not be evicted yet. Reads the whole folder."""
        files, time = scan(self.folder), now()
        return sum(file.num_bytes for file in files if not file.is_claim and file.leased_until > time)

    # The rest is called with the ledger's lock held.

    def _evict(self, num_bytes: int, dropped: ExitStack) -> None:
        """Drops entries without a lease, least recently used first, until so many bytes have room.

        Reads the whole folder only if it knows of no more entries to drop. `dropped` closes their files.
        Raises `TooManyRequests` if leased entries leave too little room.
        """
        self._drop(self._missing_bytes(num_bytes), dropped)
        if self._missing_bytes(num_bytes) <= 0:
            return
        lease_ends_at = self._look()
        if sum(entry.num_bytes for entry in self._oldest) >= self._missing_bytes(num_bytes):
            self._drop(self._missing_bytes(num_bytes), dropped)
        if self._missing_bytes(num_bytes) > 0:
            raise _full(lease_ends_at - now())

    def _missing_bytes(self, num_bytes: int) -> int:
        return self._ledger.used_bytes + num_bytes - self._ledger.limit_bytes

    def _look(self) -> float:
        """Reads the folder: what it holds, and which entries have no lease.

        Returns when the first lease ends.
        """
        files, time = [file for file in scan(self.folder) if file.num_bytes], now()
        claimed = {file.uuid for file in files if file.is_claim}
        # Entries whose request ended while they were written are not counted yet. An entry and its claim are
        # one: the entry comes second.
        sizes = {file.uuid: file.num_bytes for file in sorted(files, key=lambda file: not file.is_claim)}
        self._ledger.used_bytes, self._ledger.num_entries = sum(sizes.values()), len(sizes)
        entries = [file for file in files if file.uuid not in claimed]
        free = [entry for entry in entries if entry.leased_until <= time]
        self._oldest = deque(sorted(free, key=lambda entry: entry.used_at))
        return min((entry.leased_until for entry in entries if entry.leased_until > time), default=time)

    def _drop(self, missing: int, dropped: ExitStack) -> None:
        num_evicted = 0
        while missing > 0 and self._oldest:
            entry = self._oldest.popleft()
            if self._drop_unless_used(entry, dropped):
                missing -= entry.num_bytes
                num_evicted += 1
                self._forget(entry.num_bytes)
        self._metrics.count_evictions(num_evicted)

    def _drop_unless_used(self, stored: StoredFile, dropped: ExitStack) -> bool:
        """Drops an entry unless it was used or leased since it was looked at.

        The lock on the file itself keeps `find` from leasing it meanwhile.
        """
        try:
            with ExitStack() as opened:
                file = opened.enter_context(self._opened(stored.uuid))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                facts = os.fstat(file)
                if facts.st_mtime > now() or facts.st_atime != stored.used_at:
                    return False
                os.unlink(stored.path)
                fcntl.flock(file, fcntl.LOCK_UN)
                dropped.enter_context(opened.pop_all())
        except (FileNotFoundError, BlockingIOError):
            return False
        return True

    def _forget(self, num_bytes: int) -> None:
        self._ledger.used_bytes -= num_bytes
        self._ledger.num_entries -= 1

    @contextmanager
    def _opened(self, uuid: str) -> Iterator[int]:
        file = os.open(self._path(uuid), os.O_RDONLY | os.O_NOFOLLOW)
        try:
            yield file
        finally:
            os.close(file)

    def _path(self, uuid: str) -> str:
        return f"{self.folder}/{uuid}{SUFFIX}"

    def _claim_path(self, uuid: str) -> str:
        return f"{self.folder}/{uuid}{CLAIM_SUFFIX}"


def _full(seconds: float) -> TooManyRequests:
    """`seconds` until the first lease ends, which make 1 to 10 in `Retry-After`."""
    return TooManyRequests(
        "the store of tokens is full of leased entries",
        code="handoff_full",
        retry_after_s=min(max(math.ceil(seconds), _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S),
    )

"""The bytes that the folder of tokens holds, counted by all processes of a server.

The numbers are in a file of the folder that every process maps. A lock on the file makes a change of several
numbers, or a decision that depends on them, one step.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE = ".ledger"
_NUM_BYTES = 24  # three numbers


class Ledger:
    """One process's view of the numbers. `used_bytes` and `num_entries` are changed with the lock held."""

    def __init__(self, folder: Path) -> None:
        """Raises `OSError` if the folder was not opened by this server."""
        self._file = os.open(folder / FILE, os.O_RDWR | os.O_NOFOLLOW)
        self._numbers = memoryview(mmap.mmap(self._file, _NUM_BYTES)).cast("q")
        self._lock = threading.Lock()  # for threads of this process, which share the lock on the file

    @staticmethod
    def create(folder: Path, *, limit_bytes: int, used_bytes: int, num_entries: int) -> None:
        """Writes the file of the numbers. Raises `OSError`."""
        file = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            numbers = (limit_bytes, used_bytes, num_entries)
            os.write(file, b"".join(number.to_bytes(8, sys.byteorder, signed=True) for number in numbers))
        finally:
            os.close(file)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other thread or process changes the numbers within the block. A process that ends leaves it."""
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    @property
    def limit_bytes(self) -> int:
        """The most bytes that the folder may hold."""
        return self._numbers[0]

    @property
    def used_bytes(self) -> int:
        """The bytes of all entries, those that are still to be written among them."""
        return self._numbers[1]

    @used_bytes.setter
    def used_bytes(self, value: int) -> None:
        self._numbers[1] = value

    @property
    def num_entries(self) -> int:
        """The number of all entries, those that are still to be written among them."""
        return self._numbers[2]

    @num_entries.setter
    def num_entries(self, value: int) -> None:
        self._numbers[2] = value

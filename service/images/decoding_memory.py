"""Limits the memory of all decode threads together while they decode and resize images.

A small file may hold many pixels, so the number of threads alone does not bound their memory. Knows numbers
of bytes. Knows nothing of images or requests.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_BYTES = 2**30  # of all API servers together, unless the largest image needs more


class DecodingMemory:
    """A number of bytes that threads reserve: first come, first served, so that no thread waits forever.

    While nothing is reserved, an image of any size gets its bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._changed = threading.Condition(threading.Lock())
        self._held_bytes = 0
        self._waiting: deque[object] = deque()  # one object for each waiting thread, the next thread first

    @classmethod
    def share(cls, num_servers: int, largest_bytes: int) -> DecodingMemory:
        """The share of one of `num_servers` API servers, but never less than the largest image takes."""
        return cls(max(_BYTES // num_servers, largest_bytes))

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @contextmanager
    def room(self, num_bytes: int, is_wanted: Callable[[], bool]) -> Iterator[bool]:
        """Reserves the bytes until the block ends, and waits for them if need be.

        Yields False, without a reservation, if `is_wanted` became false during the wait.
        """
        if not self._take(num_bytes, is_wanted):
            yield False
            return
        try:
            yield True
        finally:
            with self._changed:
                self._held_bytes -= num_bytes
                self._changed.notify_all()

    def look_again(self) -> None:
        """Makes waiting threads call `is_wanted` again. Costs almost nothing if no thread waits."""
        if self._waiting:
            with self._changed:
                self._changed.notify_all()

    def _take(self, num_bytes: int, is_wanted: Callable[[], bool]) -> bool:
        with self._changed:
            if self._waiting or not self._fits(num_bytes):
                return self._wait(num_bytes, is_wanted)
            self._held_bytes += num_bytes
            return True

    def _wait(self, num_bytes: int, is_wanted: Callable[[], bool]) -> bool:
        """Called with the lock held; releases it while waiting. A thread that leaves wakes the next."""
        turn = object()
        self._waiting.append(turn)
        try:
            while is_wanted():
                if self._waiting[0] is turn and self._fits(num_bytes):
                    self._held_bytes += num_bytes
                    return True
                self._changed.wait()
            return False
        finally:
            self._waiting.remove(turn)
            self._changed.notify_all()

    def _fits(self, num_bytes: int) -> bool:
        return not self._held_bytes or self._held_bytes + num_bytes <= self.max_bytes

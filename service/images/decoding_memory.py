"""How many bytes images may take while they are decoded and resized, of all decode threads together.

A small file may hold many pixels, so the number of threads alone is no bound on their memory. Knows numbers
of bytes; nothing of images or requests.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_BYTES = 2**30  # of all API servers together, where the largest image leaves each its share


class DecodingMemory:
    """Room that threads take and wait for: first come, first served, so that none waits for ever.

    One image alone always gets its room, however large it is.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._changed = threading.Condition(threading.Lock())
        self._held_bytes = 0
        self._waiting: deque[object] = deque()  # turns, the next one first

    @classmethod
    def share(cls, num_servers: int, largest_bytes: int) -> DecodingMemory:
        """That of one of so many API servers: never less than the largest image takes."""
        return cls(max(_BYTES // num_servers, largest_bytes))

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @contextmanager
    def room(self, num_bytes: int, is_wanted: Callable[[], bool]) -> Iterator[bool]:
        """Waits for room for so many bytes and holds it until the block ends.

        False: while it waited it was wanted no more, and has no room.
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
        """Lets those who wait see whether they are still wanted. Costs next to nothing where nobody waits."""
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
        """Called under the lock, which it gives up meanwhile. Whoever leaves lets the next one look."""
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

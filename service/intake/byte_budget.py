"""How many bytes of bodies and fetched images may be in memory at once.

Used on the event loop only, so without a lock. Knows numbers of bytes; nothing of images or HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from service.errors import TooManyRequests
from service.queue.tally import OwnTally, Tally


class ByteBudget:
    """Shared by all requests. No request waits for room: it is refused, and may come again.

    `held` is the tally, for a server that shares the limit with other processes.
    """

    def __init__(self, max_bytes: int, held: Tally | None = None) -> None:
        self.max_bytes = max_bytes
        self.held = held or OwnTally()

    @property
    def held_bytes(self) -> int:
        """Of requests of this process."""
        return self.held.own

    def check(self, num_bytes: int) -> None:
        """Raises `TooManyRequests` where there is no room for so many bytes more."""
        if self.held.total + num_bytes > self.max_bytes:
            raise TooManyRequests(
                "the server holds as many bytes as it may", code="too_many_bytes", retry_after_s=1
            )

    @contextmanager
    def permit(self, expected_bytes: int) -> Iterator[Permit]:
        """What one request holds, until the block ends: nothing at first.

        Bytes count when they are there, or callers who announce many and send none would take the room of
        others. Raises `TooManyRequests` where there is no room for those that are expected.
        """
        self.check(expected_bytes)
        permit = Permit(self)
        try:
            yield permit
        finally:
            self.held.own -= permit.num_bytes


class Permit:
    """What one request holds."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Takes room for that many bytes more. Raises `TooManyRequests` where there is none."""
        self._budget.check(num_bytes)
        self._budget.held.own += num_bytes
        self.num_bytes += num_bytes

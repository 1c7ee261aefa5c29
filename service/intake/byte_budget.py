"""The limit on the bytes of bodies and fetched images in memory.

Used on the event loop only, so it needs no lock. Knows numbers of bytes; knows nothing of images or HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from service.errors import TooManyRequests
from service.queue.tally import OwnTally, Tally


class ByteBudget:
    """Shared by all requests. A request that finds no room does not wait: it is refused and may retry.

    `held` counts the bytes, for a server that shares the limit with other processes.
    """

    def __init__(self, max_bytes: int, held: Tally | None = None) -> None:
        self.max_bytes = max_bytes
        self.held = held or OwnTally()

    @property
    def held_bytes(self) -> int:
        """Bytes held by requests of this process."""
        return self.held.own

    def check(self, num_bytes: int) -> None:
        """Raises `TooManyRequests` if there is no room for `num_bytes` more."""
        if self.held.total + num_bytes > self.max_bytes:
            raise TooManyRequests(
                "the server holds as many bytes of requests as it may; retry later",
                code="too_many_bytes",
                retry_after_s=1,
            )

    @contextmanager
    def permit(self, expected_bytes: int) -> Iterator[Permit]:
        """A permit for one request. It holds no bytes at first, and releases its bytes when the block ends.

        Bytes count once they have arrived: callers that announce many bytes and send none must not take room
        from others. Raises `TooManyRequests` if there is no room for the `expected_bytes`.
        """
        self.check(expected_bytes)
        permit = Permit(self)
        try:
            yield permit
        finally:
            self.held.own -= permit.num_bytes


class Permit:
    """The bytes that one request holds."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Holds `num_bytes` more. Raises `TooManyRequests` if there is no room for them."""
        self._budget.check(num_bytes)
        self._budget.held.own += num_bytes
        self.num_bytes += num_bytes

    def keep(self, num_bytes: int) -> None:
        """Releases all bytes but `num_bytes`, if it holds more."""
        released = max(self.num_bytes - num_bytes, 0)
        self._budget.held.own -= released
        self.num_bytes -= released

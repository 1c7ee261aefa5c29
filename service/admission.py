"""How many bytes of request bodies may be in memory at once. Used on the event loop only, so without a lock.

Knows numbers of bytes; nothing of images or HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from service.errors import TooManyRequests


class ByteBudget:
    """Shared by all requests. No request waits for room: it is refused, and may come again."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0

    @contextmanager
    def permit(self, num_bytes: int) -> Iterator[Permit]:
        """Room for the bytes of one request until the block ends. Raises `TooManyRequests` without it."""
        permit = Permit(self)
        permit.cover(num_bytes)
        try:
            yield permit
        finally:
            self.held_bytes -= permit.num_bytes


class Permit:
    """What one request holds."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def cover(self, num_bytes: int) -> None:
        """Grows to that many bytes, if it is smaller. Raises `TooManyRequests` where there is no room."""
        more = num_bytes - self.num_bytes
        if more <= 0:
            return
        budget = self._budget
        if budget.held_bytes + more > budget.max_bytes:
            raise TooManyRequests(
                "the server is reading as many bytes as it may", code="too_many_bytes", retry_after_s=1
            )
        budget.held_bytes += more
        self.num_bytes = num_bytes

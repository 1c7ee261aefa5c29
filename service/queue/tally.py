"""A number that has one limit for all processes that serve together, such as reserved tokens.

Knows nothing of what it counts.
"""

from __future__ import annotations

from typing import Protocol


class Tally(Protocol):
    """`own` is the part of this process, which no other process changes; `total` sums all processes."""

    own: int

    @property
    def total(self) -> int: ...


class OwnTally:
    """The tally of a process that serves alone."""

    def __init__(self) -> None:
        self.own = 0

    @property
    def total(self) -> int:
        return self.own

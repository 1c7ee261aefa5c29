"""How much this process holds of what has one limit for all processes that serve together.

Knows numbers; nothing of what they count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tally(Protocol):
    """A number that this process alone changes, and the sum of it over all processes."""

    own: int

    @property
    def total(self) -> int: ...

    @property
    def others(self) -> Sequence[int]:
        """The numbers of the other processes."""


class OwnTally:
    """Of a process that serves alone."""

    def __init__(self) -> None:
        self.own = 0

    @property
    def total(self) -> int:
        return self.own

    @property
    def others(self) -> Sequence[int]:
        return ()

"""Asks all processes for their metrics, in rounds, and keeps the counts of API servers that have exited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client import Metric

from service.processes.supervisor.members import Member
from service.processes.supervisor.merge import merge
from service.processes.wire.messages import Gathered, Scrape

_ROUND_S = 4.0  # less than an API server waits for an answer

Calls = dict[Member, list[int]]  # the numbers of the calls of each API server


@dataclass(eq=False)
class _Round:
    """The calls that a round answers, the members that have not answered, and the answers."""

    calls: Calls
    waits_for: set[Member]
    answers: dict[Member, Sequence[Metric]] = field(default_factory=dict)


class Scraping:
    """Runs one round at a time, on the event loop. The next round answers the calls that come meanwhile.

    So no call gets metrics that are older than the call.
    """

    def __init__(
        self,
        members: Collection[Member],
        tell: Callable[[Member, object], None],
        own_metrics: Callable[[], Iterable[Metric]],
        round_s: float = _ROUND_S,
    ) -> None:
        self._members = members
        self._tell = tell
        self._own_metrics = own_metrics
        self._round_s = round_s
        self._next_calls: Calls = {}
        self._round: _Round | None = None
        self._last_counts: dict[Member, Sequence[Metric]] = {}

    def ask(self, member: Member, number: int) -> None:
        """An API server asks for the metrics of all processes, with a number for this call."""
        self._next_calls.setdefault(member, []).append(number)
        if self._round is None:
            self._begin()

    def on_scraped(self, member: Member, metrics: Sequence[Metric] | None) -> None:
        """A member has sent its metrics; None if it could not."""
        if self._round is None or member not in self._round.waits_for:
            return
        if metrics is None:
            self._end(None)
            return
        self._round.answers[member] = metrics
        self._remove(self._round, member)

    def on_farewell(self, member: Member, metrics: Sequence[Metric]) -> None:
        """A member has sent its last metrics. Its counters stay in the sums; its gauges do not."""
        self._last_counts[member] = [each for each in metrics if each.type in ("counter", "histogram")]
        if self._round is not None:
            self._round.answers.pop(member, None)
        self.on_exit(member)

    def on_exit(self, member: Member) -> None:
        """A member will not answer any more."""
        if self._round is not None and member in self._round.waits_for:
            self._remove(self._round, member)

    def _begin(self) -> None:
        running = {
            member
            for member in self._members
            if member.is_up and member.is_running and member not in self._last_counts
        }
        self._round = _Round(self._next_calls, running)
        self._next_calls = {}
        asyncio.get_running_loop().call_later(self._round_s, self._give_up, self._round)
        for member in running:
            self._tell(member, Scrape())

    def _remove(self, round_: _Round, member: Member) -> None:
        round_.waits_for.remove(member)
        if not round_.waits_for:
            self._end(merge([*round_.answers.values(), *self._last_counts.values(), self._own_metrics()]))

    def _give_up(self, round_: _Round) -> None:
        """A sum without the members that do not answer would be wrong."""
        if self._round is round_:
            self._end(None)

    def _end(self, metrics: Sequence[Metric] | None) -> None:
        assert self._round is not None, "a round ends once"
        calls = self._round.calls
        self._round = None
        for member, numbers in calls.items():
            self._tell(member, Gathered(tuple(numbers), metrics))
        if self._next_calls:
            self._begin()

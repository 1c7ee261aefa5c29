"""Asks all processes for their metrics, in rounds, and keeps the counts of API servers that have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client import Metric

from service.processes.supervisor.members import Member
from service.processes.wire.merge import merge
from service.processes.wire.messages import Scrape, Scraped

# Shorter than those who ask wait for an answer.
_ROUND_S = 4.0


@dataclass(eq=False)
class _Round:
    """Who wants to know, who has to answer, and what they have said."""

    askers: set[Member]
    waits_for: set[Member]
    answers: dict[Member, Sequence[Metric]] = field(default_factory=dict)


class Scraping:
    """One round at a time: who asks meanwhile is answered by the next one. On the event loop."""

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
        self._askers: set[Member] = set()
        self._round: _Round | None = None
        self._of_the_ended: dict[Member, Sequence[Metric]] = {}

    def ask(self, asker: Member) -> None:
        """One of them wants the metrics of all."""
        self._askers.add(asker)
        if self._round is None:
            self._begin()

    def answered(self, member: Member, metrics: Sequence[Metric] | None) -> None:
        """One of them has sent its own; None where it could not."""
        if self._round is None or member not in self._round.waits_for:
            return
        if metrics is None:
            self._end(None)
            return
        self._round.answers[member] = metrics
        self._heard_of(self._round, member)

    def ended(self, member: Member, metrics: Sequence[Metric]) -> None:
        """One of them ends, and these are its last: what it counted stays counted."""
        self._of_the_ended[member] = [each for each in metrics if each.type in ("counter", "histogram")]
        if self._round is not None:
            self._round.answers.pop(member, None)
        self.gone(member)

    def gone(self, member: Member) -> None:
        """One of them answers no more."""
        if self._round is not None and member in self._round.waits_for:
            self._heard_of(self._round, member)

    def _begin(self) -> None:
        running = {
            member
            for member in self._members
            if member.is_up and member.is_running and member not in self._of_the_ended
        }
        self._round = _Round(self._askers, running)
        self._askers = set()
        asyncio.get_running_loop().call_later(self._round_s, self._give_up, self._round)
        for member in running:
            self._tell(member, Scrape())

    def _heard_of(self, round_: _Round, member: Member) -> None:
        round_.waits_for.remove(member)
        if not round_.waits_for:
            self._end(merge([*round_.answers.values(), *self._of_the_ended.values(), self._own_metrics()]))

    def _give_up(self, round_: _Round) -> None:
        """A sum without those that do not answer would be wrong."""
        if self._round is round_:
            self._end(None)

    def _end(self, metrics: Sequence[Metric] | None) -> None:
        assert self._round is not None, "a round ends once"
        askers = self._round.askers
        self._round = None
        for asker in askers:
            self._tell(asker, Scraped(metrics))
        if self._askers:
            self._begin()

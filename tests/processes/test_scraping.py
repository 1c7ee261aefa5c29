from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Metric

from service.processes.supervisor.members import Member
from service.processes.supervisor.scraping import Scraping
from service.processes.wire.messages import Scrape, Scraped
from tests.support.clock import SkippingLoop, skip


class FakeMember:
    """Notes what it is told."""

    def __init__(self, count: int) -> None:
        registry = CollectorRegistry()
        Counter("things", "Things.", registry=registry).inc(count)
        Gauge("waiting", "What waits.", registry=registry).set(count)
        self.metrics = list(registry.collect())
        self.is_up = True
        self.is_running = True
        self.told: list[object] = []

    @property
    def num_asked(self) -> int:
        return sum(isinstance(message, Scrape) for message in self.told)

    @property
    def answers(self) -> list[dict[str, float] | None]:
        """To what it asked."""
        return [
            None if message.metrics is None else values(message.metrics)
            for message in self.told
            if isinstance(message, Scraped)
        ]


def values(metrics: Sequence[Metric]) -> dict[str, float]:
    found = {sample.name: sample.value for metric in metrics for sample in metric.samples}
    return {name: value for name, value in found.items() if not name.endswith("_created")}


class Server:
    """Members, and what asks them."""

    def __init__(self, *counts: int, round_s: float = 60.0) -> None:
        self.members = [FakeMember(count) for count in counts]
        self.scraping = Scraping(
            cast(Sequence[Member], self.members),
            lambda member, message: cast(Any, member).told.append(message),
            FakeMember(0).metrics.copy,
            round_s=round_s,
        )

    def ask(self, index: int) -> None:
        self.scraping.ask(cast(Member, self.members[index]))

    def answer(self, index: int) -> None:
        self.scraping.answered(cast(Member, self.members[index]), self.members[index].metrics)


Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture
def run() -> Iterator[Run]:
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        yield runner.run


def test_who_asks_gets_the_sum_once_all_have_answered(run: Run) -> None:
    async def scenario() -> None:
        server = Server(1, 20)
        server.ask(1)
        assert [member.num_asked for member in server.members] == [1, 1]
        server.answer(0)
        assert server.members[1].answers == []
        server.answer(1)
        assert server.members[1].answers == [{"things_total": 21, "waiting": 21}]
        assert server.members[0].answers == []

    run(scenario())


def test_who_asks_in_the_middle_of_a_round_is_answered_by_the_next(run: Run) -> None:
    async def scenario() -> None:
        server = Server(1, 20)
        server.ask(0)
        server.answer(0)
        server.ask(1)
        server.ask(1)
        server.members[0].metrics = FakeMember(100).metrics
        server.answer(1)
        assert server.members[0].answers == [{"things_total": 21, "waiting": 21}]
        assert [member.num_asked for member in server.members] == [2, 2]
        server.answer(1)
        server.answer(0)
        expected = {"things_total": 120, "waiting": 120}
        assert server.members[1].answers == [expected]

    run(scenario())


def test_a_round_that_is_not_answered_ends_and_the_next_one_begins(run: Run) -> None:
    async def scenario() -> None:
        server = Server(1, 20, round_s=4.0)
        server.ask(0)
        server.answer(1)
        server.ask(1)
        await skip(3.9)
        assert server.members[0].answers == []
        await skip(0.1)
        assert server.members[0].answers == [None]
        server.answer(0)
        server.answer(1)
        assert server.members[1].answers == [{"things_total": 21, "waiting": 21}]
        await skip(4.0)
        server.ask(0)
        assert [member.num_asked for member in server.members] == [3, 3]

    run(scenario())


def test_a_round_has_its_whole_time_however_short_the_one_before_it_was(run: Run) -> None:
    async def scenario() -> None:
        server = Server(1, 20, round_s=4.0)
        server.ask(0)
        server.answer(0)
        server.answer(1)
        await skip(2.0)
        server.ask(1)
        await skip(2.0)
        assert server.members[1].answers == []
        server.answer(0)
        server.answer(1)
        assert server.members[1].answers == [{"things_total": 21, "waiting": 21}]

    run(scenario())


def test_an_answer_more_than_was_asked_for_changes_nothing(run: Run) -> None:
    async def scenario() -> None:
        server = Server(1, 20)
        server.answer(0)
        server.ask(0)
        server.answer(1)
        server.members[1].metrics = FakeMember(100).metrics
        server.answer(1)
        server.answer(0)
        server.answer(0)
        assert server.members[0].answers == [{"things_total": 21, "waiting": 21}]
        assert [member.num_asked for member in server.members] == [1, 1]

    run(scenario())


def test_what_an_ended_one_counted_stays_counted_and_what_it_held_does_not(run: Run) -> None:
    async def scenario() -> None:
        server = Server(1, 20)
        server.ask(0)
        server.answer(0)
        gone = server.members[1]
        server.scraping.ended(cast(Member, gone), gone.metrics)
        gone.is_running = False
        assert server.members[0].answers == [{"things_total": 21, "waiting": 1}]
        server.ask(0)
        server.answer(0)
        assert server.members[0].answers[1] == {"things_total": 21, "waiting": 1}
        assert gone.num_asked == 1

    run(scenario())


def test_one_that_is_gone_is_not_waited_for(run: Run) -> None:
    async def scenario() -> None:
        server = Server(1, 20)
        server.ask(0)
        server.answer(0)
        gone = server.members[1]
        server.scraping.gone(cast(Member, gone))
        gone.is_running = False
        assert server.members[0].answers == [{"things_total": 1, "waiting": 1}]
        server.ask(0)
        server.answer(0)
        assert server.members[0].answers[1] == {"things_total": 1, "waiting": 1}
        assert gone.num_asked == 1

    run(scenario())


def test_one_that_answers_and_then_ends_is_counted_once(run: Run) -> None:
    async def scenario() -> None:
        server = Server(1, 20)
        server.ask(0)
        server.answer(1)
        gone = server.members[1]
        server.scraping.ended(cast(Member, gone), gone.metrics)
        server.answer(0)
        assert server.members[0].answers == [{"things_total": 21, "waiting": 1}]
        server.ask(0)  # its process has not ended yet
        assert gone.num_asked == 1
        server.answer(0)
        assert server.members[0].answers[1] == {"things_total": 21, "waiting": 1}

    run(scenario())


def test_one_that_cannot_say_its_own_ends_the_round(run: Run) -> None:
    async def scenario() -> None:
        server = Server(1, 20)
        server.ask(0)
        server.scraping.answered(cast(Member, server.members[1]), None)
        assert server.members[0].answers == [None]
        server.ask(0)
        assert server.members[1].num_asked == 2

    run(scenario())


def test_one_that_is_not_up_yet_is_not_asked(run: Run) -> None:
    async def scenario() -> None:
        server = Server(1, 20)
        server.members[1].is_up = False
        server.ask(0)
        server.answer(0)
        assert server.members[0].answers == [{"things_total": 1, "waiting": 1}]
        assert server.members[1].num_asked == 0

    run(scenario())

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import count
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Metric

from service.processes.supervisor.members import Member
from service.processes.supervisor.scraping import Scraping
from service.processes.wire.messages import Gathered, Scrape
from tests.support.clock import SkippingLoop, skip


class FakeMember:
    """Keeps the messages that it gets."""

    def __init__(self, value: int) -> None:
        registry = CollectorRegistry()
        Counter("things", "Things.", registry=registry).inc(value)
        Gauge("waiting", "Waits.", registry=registry).set(value)
        self.metrics = list(registry.collect())
        self.is_up = True
        self.is_running = True
        self.told: list[object] = []

    @property
    def num_asked(self) -> int:
        return sum(isinstance(message, Scrape) for message in self.told)

    @property
    def answers(self) -> list[dict[str, float] | None]:
        """The metrics in the answers to its calls."""
        return [
            None if message.metrics is None else values(message.metrics)
            for message in self.told
            if isinstance(message, Gathered)
        ]

    @property
    def numbers(self) -> list[int]:
        """The calls that were answered."""
        return [
            number for message in self.told if isinstance(message, Gathered) for number in message.numbers
        ]


def values(metrics: Sequence[Metric]) -> dict[str, float]:
    found = {sample.name: sample.value for metric in metrics for sample in metric.samples}
    return {name: value for name, value in found.items() if not name.endswith("_created")}


class Server:
    """Members, and the scraping of them."""

    def __init__(self, *counts: int, round_s: float = 60.0) -> None:
        self.members = [FakeMember(each) for each in counts]
        self.numbers = count()  # of the calls
        self.scraping = Scraping(
            cast(Sequence[Member], self.members),
            lambda member, message: cast(Any, member).told.append(message),
            FakeMember(0).metrics.copy,
            round_s=round_s,
        )

    def ask(self, index: int) -> None:
        self.scraping.ask(cast(Member, self.members[index]), next(self.numbers))

    def answer(self, index: int) -> None:
        self.scraping.on_scraped(cast(Member, self.members[index]), self.members[index].metrics)


Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture
def run() -> Iterator[Run]:
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        yield runner.run


def test_call_is_answered_with_the_sum_once_all_have_answered(run: Run) -> None:
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


def test_calls_in_the_middle_of_a_round_are_answered_by_the_next_round(run: Run) -> None:
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
        assert server.members[0].numbers == [0]
        assert server.members[1].numbers == [1, 2]

    run(scenario())


def test_round_ends_if_a_member_does_not_answer_and_the_next_begins(run: Run) -> None:
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


def test_round_has_its_whole_time_after_a_short_round(run: Run) -> None:
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


def test_unexpected_answer_changes_nothing(run: Run) -> None:
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


def test_after_the_last_metrics_of_a_member_its_counters_stay_and_its_gauges_do_not(run: Run) -> None:
    async def scenario() -> None:
        server = Server(1, 20)
        server.ask(0)
        server.answer(0)
        gone = server.members[1]
        server.scraping.on_farewell(cast(Member, gone), gone.metrics)
        gone.is_running = False
        assert server.members[0].answers == [{"things_total": 21, "waiting": 1}]
        server.ask(0)
        server.answer(0)
        assert server.members[0].answers[1] == {"things_total": 21, "waiting": 1}
        assert gone.num_asked == 1

    run(scenario())


def test_member_that_has_exited_is_not_waited_for(run: Run) -> None:
    async def scenario() -> None:
        server = Server(1, 20)
        server.ask(0)
        server.answer(0)
        gone = server.members[1]
        server.scraping.on_exit(cast(Member, gone))
        gone.is_running = False
        assert server.members[0].answers == [{"things_total": 1, "waiting": 1}]
        server.ask(0)
        server.answer(0)
        assert server.members[0].answers[1] == {"things_total": 1, "waiting": 1}
        assert gone.num_asked == 1

    run(scenario())


def test_member_that_answers_and_then_exits_is_counted_once(run: Run) -> None:
    async def scenario() -> None:
        server = Server(1, 20)
        server.ask(0)
        server.answer(1)
        gone = server.members[1]
        server.scraping.on_farewell(cast(Member, gone), gone.metrics)
        server.answer(0)
        assert server.members[0].answers == [{"things_total": 21, "waiting": 1}]
        server.ask(0)  # its process has not ended yet
        assert gone.num_asked == 1
        server.answer(0)
        assert server.members[0].answers[1] == {"things_total": 21, "waiting": 1}

    run(scenario())


def test_member_that_cannot_send_its_metrics_ends_the_round(run: Run) -> None:
    async def scenario() -> None:
        server = Server(1, 20)
        server.ask(0)
        server.scraping.on_scraped(cast(Member, server.members[1]), None)
        assert server.members[0].answers == [None]
        server.ask(0)
        assert server.members[1].num_asked == 2

    run(scenario())


def test_member_that_is_not_up_is_not_asked(run: Run) -> None:
    async def scenario() -> None:
        server = Server(1, 20)
        server.members[1].is_up = False
        server.ask(0)
        server.answer(0)
        assert server.members[0].answers == [{"things_total": 1, "waiting": 1}]
        assert server.members[1].num_asked == 0

    run(scenario())

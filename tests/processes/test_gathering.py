"""What one API server asks the supervisor for, and who is answered. No test waits: time is put forward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence

import pytest
from prometheus_client import Metric

from service.errors import Unavailable
from service.metrics import Collects
from service.processes.api_server.gathering import Gathering
from service.processes.wire.messages import Scrape
from tests.support.clock import SkippingLoop, settle, skip

LONG_S = 5.0  # after which no answer is waited for
SHORT_S = 3.0


class Supervisor:
    """Is asked, and answers when the test says so."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.error: OSError | None = None
        self.gathering = Gathering(self._tell)

    def _tell(self, message: object) -> None:
        if self.error is not None:
            raise self.error
        self.told.append(message)

    @property
    def num_asked(self) -> int:
        assert all(isinstance(message, Scrape) for message in self.told)
        return len(self.told)

    async def ask(self) -> asyncio.Task[Collects]:
        """One who wants to know, and has begun to wait."""
        asking = asyncio.create_task(self.gathering.gather())
        await settle()
        return asking

    async def answer(self, name: str | None) -> None:
        """None: not all have answered."""
        self.gathering.answered(None if name is None else [Metric(name, "", "gauge")])
        await settle()


def outcomes(*askers: asyncio.Task[Collects]) -> list[str | None]:
    """The names of the metrics that they got, and for a 503 its code. None: still waits."""
    return [outcome(asker) for asker in askers]


def outcome(asker: asyncio.Task[Collects]) -> str | None:
    if not asker.done():
        return None
    error = asker.exception()
    if error is not None:
        assert isinstance(error, Unavailable)
        return error.code
    metrics: Sequence[Metric] = [*asker.result().collect()]
    return ",".join(metric.name for metric in metrics)


def run(talk: Callable[[Supervisor], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(talk(Supervisor()))


def test_who_asks_gets_what_the_supervisor_gathers() -> None:
    async def talk(supervisor: Supervisor) -> None:
        for number, name in enumerate(("first", "second"), 1):
            asking = await supervisor.ask()
            assert supervisor.num_asked == number
            assert outcomes(asking) == [None]
            await supervisor.answer(name)
            assert outcomes(asking) == [name]

    run(talk)


def test_all_who_ask_meanwhile_share_the_next_question() -> None:
    """What is on its way may be older than their question."""

    async def talk(supervisor: Supervisor) -> None:
        first = await supervisor.ask()
        later = [await supervisor.ask() for _ in range(3)]
        assert supervisor.num_asked == 1
        await supervisor.answer("first")
        assert outcomes(first, *later) == ["first", None, None, None]
        assert supervisor.num_asked == 2
        last = await supervisor.ask()
        await supervisor.answer("second")
        assert outcomes(*later, last) == ["second"] * 3 + [None]
        assert supervisor.num_asked == 3
        await supervisor.answer("third")
        assert outcomes(last) == ["third"]
        assert supervisor.num_asked == 3  # no one wants to know any more

    run(talk)


def test_where_not_all_processes_answer_there_are_no_metrics_and_the_next_question_goes_out() -> None:
    async def talk(supervisor: Supervisor) -> None:
        first = await supervisor.ask()
        later = await supervisor.ask()
        await supervisor.answer(None)
        assert outcomes(first, later) == ["not_ready", None]
        await supervisor.answer("second")
        assert outcomes(later) == ["second"]

    run(talk)


def test_an_answer_that_is_lost_costs_those_who_wait_for_it_and_no_one_later() -> None:
    async def talk(supervisor: Supervisor) -> None:
        first = await supervisor.ask()
        await skip(SHORT_S)
        assert outcomes(first) == [None]
        later = await supervisor.ask()
        await skip(LONG_S - SHORT_S)
        assert outcomes(first, later) == ["not_ready", None]
        assert supervisor.num_asked == 2
        await supervisor.answer("second")
        assert outcomes(later) == ["second"]
        last = await supervisor.ask()
        await skip(LONG_S)
        assert outcomes(last) == ["not_ready"]
        last = await supervisor.ask()  # no one waited for the next question when that one was given up
        assert supervisor.num_asked == 4
        await supervisor.answer("fourth")
        assert outcomes(last) == ["fourth"]

    run(talk)


def test_all_who_share_a_question_whose_answer_is_lost_are_told_and_it_is_given_up_once() -> None:
    async def talk(supervisor: Supervisor) -> None:
        await supervisor.ask()
        sharing = [await supervisor.ask() for _ in range(3)]
        await skip(SHORT_S)
        await supervisor.answer("first")
        next_one = await supervisor.ask()
        await skip(LONG_S - SHORT_S)
        assert outcomes(*sharing, next_one) == ["not_ready"] * 3 + [None]
        assert supervisor.num_asked == 3
        await supervisor.answer("third")
        assert outcomes(next_one) == ["third"]

    run(talk)


def test_who_gives_up_before_its_question_goes_out_does_not_end_that_of_others() -> None:
    async def talk(supervisor: Supervisor) -> None:
        first = await supervisor.ask()
        leaving, staying = await supervisor.ask(), await supervisor.ask()
        leaving.cancel()
        await settle()
        assert leaving.cancelled()
        await supervisor.answer("first")
        await supervisor.answer("second")
        assert outcomes(first, staying) == ["first", "second"]

    run(talk)


def test_who_leaves_takes_the_answer_from_no_one() -> None:
    async def talk(supervisor: Supervisor) -> None:
        leaving = await supervisor.ask()
        later = await supervisor.ask()
        leaving.cancel()
        await settle()
        assert supervisor.num_asked == 1
        await supervisor.answer("first")
        await supervisor.answer("second")
        assert outcomes(later) == ["second"]

    run(talk)


def test_a_supervisor_that_cannot_be_asked_is_no_metrics_and_can_be_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def talk(supervisor: Supervisor) -> None:
        supervisor.error = OSError("no file for it")
        assert outcomes(await supervisor.ask()) == ["not_ready"]
        supervisor.error = None
        first = await supervisor.ask()
        later = await supervisor.ask()
        supervisor.error = OSError("gone")
        await supervisor.answer("first")
        assert outcomes(first, later) == ["first", "not_ready"]

    run(talk)
    assert [record.getMessage() for record in caplog.records] == [
        "cannot ask for metrics: no file for it",
        "cannot ask for metrics: gone",
    ]


def test_an_answer_that_nobody_waits_for_is_dropped() -> None:
    async def talk(supervisor: Supervisor) -> None:
        await supervisor.answer("early")
        asking = await supervisor.ask()
        assert supervisor.num_asked == 1
        assert outcomes(asking) == [None]
        await supervisor.answer("own")
        assert outcomes(asking) == ["own"]

    run(talk)

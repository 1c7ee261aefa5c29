"""The calls of one API server to the supervisor for the metrics of all processes. Time is put forward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence

import pytest
from prometheus_client import Metric

from service.errors import Unavailable
from service.metrics import Collects
from service.processes.api_server.scrape_client import ScrapeClient
from service.processes.wire.messages import Gather
from tests.support.clock import SkippingLoop, settle, skip

TIMEOUT_S = 5.0
SHORT_S = 3.0


class Supervisor:
    """Notes the calls, and answers them when the test says so."""

    def __init__(self) -> None:
        self.messages: list[object] = []
        self.error: OSError | None = None
        self.client = ScrapeClient(self._tell)

    def _tell(self, message: object) -> None:
        if self.error is not None:
            raise self.error
        self.messages.append(message)

    @property
    def numbers(self) -> list[int]:
        """The numbers of all calls."""
        return [message.number for message in self.messages if isinstance(message, Gather)]

    async def call(self) -> asyncio.Task[Collects]:
        """A call that has begun to wait."""
        calling = asyncio.create_task(self.client.gather())
        await settle()
        return calling

    async def answer(self, name: str | None, *numbers: int) -> None:
        """Answers calls with a metric of that name; None: with no metrics."""
        self.client.on_gathered(numbers, None if name is None else [Metric(name, "", "gauge")])
        await settle()


def outcomes(*calls: asyncio.Task[Collects]) -> list[str | None]:
    """The names of the metrics of each call, or the code of its error, or None while it waits."""
    return [outcome(call) for call in calls]


def outcome(call: asyncio.Task[Collects]) -> str | None:
    if not call.done():
        return None
    error = call.exception()
    if error is not None:
        assert isinstance(error, Unavailable)
        return error.code
    metrics: Sequence[Metric] = [*call.result().collect()]
    return ",".join(metric.name for metric in metrics)


def run(talk: Callable[[Supervisor], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(talk(Supervisor()))


def test_call_returns_the_answer_of_the_supervisor() -> None:
    async def talk(supervisor: Supervisor) -> None:
        for number, name in enumerate(("first", "second")):
            call = await supervisor.call()
            assert supervisor.numbers == [*range(number + 1)]
            assert outcomes(call) == [None]
            await supervisor.answer(name, number)
            assert outcomes(call) == [name]

    run(talk)


def test_answer_ends_only_the_calls_that_it_names() -> None:
    """An answer on its way may be older than a call, and then does not name it."""

    async def talk(supervisor: Supervisor) -> None:
        calls = [await supervisor.call() for _ in range(4)]
        assert len({*supervisor.numbers}) == 4
        await supervisor.answer("first", 0)
        assert outcomes(*calls) == ["first", None, None, None]
        await supervisor.answer("second", 1, 2, 3)
        assert outcomes(*calls) == ["first"] + ["second"] * 3

    run(talk)


def test_answer_without_metrics_is_an_error_of_its_calls_only() -> None:
    async def talk(supervisor: Supervisor) -> None:
        first, later = await supervisor.call(), await supervisor.call()
        await supervisor.answer(None, 0)
        assert outcomes(first, later) == ["not_ready", None]
        await supervisor.answer("second", 1)
        assert outcomes(later) == ["second"]

    run(talk)


def test_lost_answer_does_not_delay_other_calls() -> None:
    async def talk(supervisor: Supervisor) -> None:
        first = await supervisor.call()
        await skip(SHORT_S)
        later = await supervisor.call()
        await skip(TIMEOUT_S - SHORT_S)
        assert outcomes(first, later) == ["not_ready", None]
        await supervisor.answer("second", 1)
        assert outcomes(later) == ["second"]
        last = await supervisor.call()
        await skip(TIMEOUT_S)
        assert outcomes(last) == ["not_ready"]

    run(talk)


def test_abandoned_call_does_not_block_others() -> None:
    async def talk(supervisor: Supervisor) -> None:
        leaving, staying = await supervisor.call(), await supervisor.call()
        leaving.cancel()
        await settle()
        assert leaving.cancelled()
        await supervisor.answer("both", 0, 1)
        assert outcomes(staying) == ["both"]

    run(talk)


def test_call_fails_if_the_supervisor_cannot_be_asked_and_the_next_call_asks_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def talk(supervisor: Supervisor) -> None:
        supervisor.error = OSError("no file for it")
        assert outcomes(await supervisor.call()) == ["not_ready"]
        supervisor.error = None
        call = await supervisor.call()
        await supervisor.answer("second", *supervisor.numbers)
        assert outcomes(call) == ["second"]

    run(talk)
    assert [record.getMessage() for record in caplog.records] == ["cannot ask for metrics: no file for it"]


def test_answer_that_no_call_waits_for_is_dropped() -> None:
    async def talk(supervisor: Supervisor) -> None:
        await supervisor.answer("early", 0)
        call = await supervisor.call()
        assert outcomes(call) == [None]
        await supervisor.answer("own", 0)
        await supervisor.answer("late", 0)
        assert outcomes(call) == ["own"]

    run(talk)

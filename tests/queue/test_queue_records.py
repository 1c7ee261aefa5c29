from __future__ import annotations

from concurrent.futures import Future

import pytest

from models import BatchResult
from service.queue.queue_records import Device, Entry
from tests.support.queueing import Callers, item


class Clocked:
    """A device whose batches took as long as the test says: long enough that its own time is nothing."""

    def __init__(self, callers: Callers) -> None:
        self.device = Device()
        self._ticket = callers.ticket()

    def start(self, *sizes: int) -> Future[BatchResult]:
        batch: Future[BatchResult] = Future()
        self.device.started(batch, [Entry(self._ticket, i, item(size)) for i, size in enumerate(sizes)])
        return batch

    def finish(self, batch: Future[BatchResult], after_s: float) -> None:
        self.device.last_progress_at -= after_s
        self.device.finished(batch)


@pytest.fixture
def clocked(callers: Callers) -> Clocked:
    return Clocked(callers)


def test_the_rate_of_a_device_is_an_average_that_forgets_slowly(clocked: Clocked) -> None:
    rates = []
    for sizes, seconds in (((1000,), 1e4), ((600, 400), 1e3), ((1000,), 1e5)):
        clocked.finish(clocked.start(*sizes), seconds)
        rates.append(clocked.device.tokens_per_s)
    assert rates == pytest.approx([0.1, 0.19, 0.172], rel=0.01)  # nine tenths of the past, from the second on


def test_a_batch_counts_from_the_end_of_the_one_before_it(clocked: Clocked) -> None:
    first = clocked.start(100)
    second = clocked.start(100)
    clocked.finish(first, 1e4)
    clocked.finish(second, 1e4)
    assert clocked.device.tokens_per_s == pytest.approx(0.01, rel=0.01)


def test_what_is_launched_behind_a_batch_does_not_make_the_device_get_on(clocked: Clocked) -> None:
    """Or one that is stuck would never be found out."""
    clocked.start(1)
    clocked.device.last_progress_at = since = clocked.device.last_progress_at - 1e4
    clocked.start(1)
    assert clocked.device.last_progress_at == since


def test_time_without_work_is_no_time_of_the_next_batch(clocked: Clocked) -> None:
    clocked.finish(clocked.start(100), 1e4)
    clocked.device.last_progress_at -= 1e6
    clocked.finish(clocked.start(100), 1e4)
    assert clocked.device.tokens_per_s == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize(
    ("is_waiting", "has_work", "is_lost", "is_idle"),
    [
        (True, False, False, True),
        (False, False, False, False),
        (True, True, False, False),
        (True, False, True, False),
    ],
)
def test_a_device_is_idle_while_it_waits_and_has_nothing(
    clocked: Clocked, is_waiting: bool, has_work: bool, is_lost: bool, is_idle: bool
) -> None:
    if has_work:
        clocked.start(1)
    clocked.device.is_waiting = is_waiting
    clocked.device.is_lost = is_lost
    assert clocked.device.is_idle == is_idle

from __future__ import annotations

import pytest

from service.queue.queue_records import DeviceRecord, QueuedImage, TakenBatch
from tests.support.queueing import Callers, item


class Clocked:
    """A device whose clock the test sets."""

    def __init__(self, callers: Callers) -> None:
        self.device = DeviceRecord()
        self.now = 1e6
        self._ticket = callers.ticket()
        self._num_started = 0

    def start(self, *sizes: int) -> int:
        """The number of a batch of images with so many tokens each."""
        images = [QueuedImage(self._ticket, i, item(size)) for i, size in enumerate(sizes)]
        self._num_started += 1
        self.device.started(TakenBatch(self._num_started, images), self.now)
        return self._num_started

    def finish(self, number: int, after_s: float) -> None:
        self.now += after_s
        self.device.finished(number, self.now)


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


def test_taking_another_batch_is_no_progress(clocked: Clocked) -> None:
    """Otherwise a stuck device would never be found."""
    clocked.start(1)
    since = clocked.now
    clocked.now += 1e4
    clocked.start(1)
    assert clocked.device.last_progress_at == since


def test_idle_time_does_not_count_for_the_next_batch(clocked: Clocked) -> None:
    clocked.finish(clocked.start(100), 1e4)
    clocked.now += 1e6
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
def test_a_device_is_idle_while_it_waits_and_has_no_batch(
    clocked: Clocked, is_waiting: bool, has_work: bool, is_lost: bool, is_idle: bool
) -> None:
    if has_work:
        clocked.start(1)
    clocked.device.is_waiting = is_waiting
    clocked.device.is_lost = is_lost
    assert clocked.device.is_idle == is_idle

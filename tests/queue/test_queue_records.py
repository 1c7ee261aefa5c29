from __future__ import annotations

import pytest

from service.queue.queue_records import DeviceRecord, QueuedImage, TakenBatch
from tests.support.queueing import Callers, item


class TimedDevice:
    """A device record and its clock, which the test moves."""

    def __init__(self, callers: Callers) -> None:
        self.device = DeviceRecord()
        self.now = 1e6
        self._ticket = callers.ticket()
        self._num_started = 0

    def start(self, *sizes: int) -> int:
        """Starts a batch of images of these sizes in tokens. Returns the number of the batch."""
        images = [QueuedImage(self._ticket, i, item(size)) for i, size in enumerate(sizes)]
        self._num_started += 1
        self.device.started(TakenBatch(self._num_started, images), self.now)
        return self._num_started

    def finish(self, number: int, after_s: float) -> None:
        self.now += after_s
        self.device.finished(number, self.now)


@pytest.fixture
def timed(callers: Callers) -> TimedDevice:
    return TimedDevice(callers)


def test_rate_of_a_device_is_a_slowly_moving_average(timed: TimedDevice) -> None:
    rates = []
    for sizes, seconds in (((1000,), 1e4), ((600, 400), 1e3), ((1000,), 1e5)):
        timed.finish(timed.start(*sizes), seconds)
        rates.append(timed.device.tokens_per_s)
    # From the second batch on, the past weighs 0.9.
    assert rates == pytest.approx([0.1, 0.19, 0.172], rel=0.01)


def test_time_of_a_batch_starts_when_the_batch_before_it_ends(timed: TimedDevice) -> None:
    first = timed.start(100)
    second = timed.start(100)
    timed.finish(first, 1e4)
    timed.finish(second, 1e4)
    assert timed.device.tokens_per_s == pytest.approx(0.01, rel=0.01)


def test_taking_another_batch_is_not_progress(timed: TimedDevice) -> None:
    """Otherwise a stuck device would never be found."""
    timed.start(1)
    since = timed.now
    timed.now += 1e4
    timed.start(1)
    assert timed.device.last_progress_at == since


def test_idle_time_does_not_count_towards_the_next_batch(timed: TimedDevice) -> None:
    timed.finish(timed.start(100), 1e4)
    timed.now += 1e6
    timed.finish(timed.start(100), 1e4)
    assert timed.device.tokens_per_s == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize(
    ("is_waiting", "has_work", "is_lost", "is_idle"),
    [
        (True, False, False, True),
        (False, False, False, False),
        (True, True, False, False),
        (True, False, True, False),
    ],
)
def test_device_is_idle_while_it_waits_and_has_no_batch(
    timed: TimedDevice, is_waiting: bool, has_work: bool, is_lost: bool, is_idle: bool
) -> None:
    if has_work:
        timed.start(1)
    timed.device.is_waiting = is_waiting
    timed.device.is_lost = is_lost
    assert timed.device.is_idle == is_idle

"""The queue for devices of other processes, lost devices, and many threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from models import DeviceError
from service.errors import (
    DeadlineExceeded,
    InternalError,
)
from service.queue.ticket import Abandoned
from tests.support.batcher import LOST, MakeQueue, RunningJob
from tests.support.queueing import item
from tests.support.waiting import eventually

# Devices in other processes, which call `wait` and `poll`


def test_wait_takes_nothing_and_poll_forms_the_batch(make_queue: MakeQueue) -> None:
    queue = make_queue()
    waiting = queue.wait()
    ticket = queue.put(item(1, 1))
    assert waiting.result(10)
    later = queue.put(item(1, 2))
    assert queue.batcher.waiting_images == 2  # nothing is taken yet
    batch = queue.poll()
    assert batch is not None
    assert batch.values == [1, 2]
    batch.finish()
    assert [queue.answer(one) for one in (ticket, later)] == [[1], [2]]
    queue.assert_empty()


def test_poll_returns_none_if_no_image_waits(make_queue: MakeQueue) -> None:
    queue = make_queue()
    assert queue.poll() is None
    ticket = queue.put(item(1, 1))
    assert queue.wait().result(10)
    queue.batcher.cancel(ticket)
    assert queue.poll() is None
    queue.assert_empty()
    waiting = queue.wait()
    queue.put(item(1, 2))
    assert waiting.result(10)
    batch = queue.poll()
    assert batch is not None
    assert batch.values == [2]


def test_poll_ends_requests_past_their_deadline(make_queue: MakeQueue) -> None:
    queue = make_queue()
    late = queue.put(item(1, 1), deadline=time.perf_counter() - 1)
    in_time = queue.put(item(1, 2))
    assert queue.wait().result(10)
    batch = queue.poll()
    assert batch is not None
    batch.finish()
    assert isinstance(queue.callers.error(late), DeadlineExceeded)
    assert queue.answer(in_time) == [2]


def test_device_inside_wait_is_not_idle(make_queue: MakeQueue) -> None:
    """It may be busy with batches of other API servers."""
    queue = make_queue("a", "b", max_batch_tokens=100)
    waiting = queue.wait("b")
    queue.put(*[item(1, value) for value in range(4)])
    assert waiting.result(10)
    assert queue.take("a").values == [0, 1, 2, 3]


def test_poll_returns_none_once_the_request_is_cancelled(make_queue: MakeQueue) -> None:
    queue = make_queue("a", "b", max_batch_tokens=100)
    ticket = queue.put(item(1, 1))
    assert queue.wait("b").result(10)
    queue.batcher.cancel(ticket)
    assert queue.poll("b") is None
    queue.put(item(1, 2), item(1, 3))
    assert queue.wait("a").result(10)
    batch = queue.poll("a")
    assert batch is not None
    assert batch.values == [2, 3]


def test_wait_and_poll_respect_max_wait_s(make_queue: MakeQueue) -> None:
    queue = make_queue(max_wait_s=3600.0)
    waiting = queue.wait()
    queue.put(item(4, 1))
    with pytest.raises(TimeoutError):
        waiting.result(0.05)
    assert queue.poll() is None
    queue.put(item(6, 2))
    assert waiting.result(10)
    batch = queue.poll()
    assert batch is not None
    assert batch.values == [1, 2]


@pytest.mark.parametrize("is_lost", [True, False])
@pytest.mark.parametrize("has_images", [True, False])
def test_wait_and_poll_return_for_a_lost_device_and_after_close(
    make_queue: MakeQueue, is_lost: bool, has_images: bool
) -> None:
    queue = make_queue("a", "b")
    early = queue.wait("a")
    if has_images:
        queue.put(item(1, 1))
        assert early.result(10)
    if is_lost:
        queue.batcher.lose("a", DeviceError("a", LOST))
    else:
        queue.batcher.close()
    if not has_images:
        assert not early.result(10)
    assert queue.poll("a") is None
    assert not queue.wait("a").result(10)


# Batches that fail


def test_retry_wakes_a_waiting_device(make_queue: MakeQueue) -> None:
    queue = make_queue()
    queue.put(item(2, 1), item(2, 2))
    batch = queue.take()
    waiting = queue.waiting()
    batch.fail(RuntimeError("odd shape"))
    again = waiting.result(10)
    assert again is not None
    assert again.values == [1]


# Devices that fail


def test_device_is_lost_once(make_queue: MakeQueue) -> None:
    queue = make_queue()
    queue.put(item(10), item(10))
    batches = [queue.take(), queue.take()]
    for batch in batches:
        batch.fail(DeviceError("a", LOST))
    assert queue.lost == ["a"]


def test_lost_device_is_not_idle(make_queue: MakeQueue) -> None:
    queue = make_queue("a", "b", max_batch_tokens=100)
    lost = queue.waiting("b")
    queue.batcher.lose("b", DeviceError("b", LOST))
    assert lost.result(10) is None
    queue.batcher._state.devices["b"].is_waiting = True  # as if its thread had been killed while it waited
    queue.put(*[item(1)] * 4)
    assert len(queue.take("a").items) == 4


def test_close_makes_take_return(make_queue: MakeQueue) -> None:
    queue = make_queue("a", "b")
    taking = [queue.waiting(name) for name in ("a", "b")]
    queue.batcher.close()
    assert [future.result(10) for future in taking] == [None, None]


# Random histories


@pytest.mark.parametrize("uses_poll", [False, True])
def test_many_threads_lose_no_request_and_leave_nothing_reserved(
    make_queue: MakeQueue, uses_poll: bool
) -> None:
    """Each device and each caller has a thread. One of the four callers cancels its requests."""
    names = ("a", "b", "c")
    queue = make_queue(*names, max_batch_tokens=16, max_queue_tokens=10**6)
    tickets = [queue.callers.ticket() for _ in range(400)]

    def batches(name: str) -> Iterator[RunningJob]:
        if uses_poll:
            while queue.batcher.wait(name):
                if batch := queue.poll(name):
                    yield batch
        else:
            while taken := queue.batcher.take(name):
                yield RunningJob(name, *taken)

    def device(name: str) -> None:
        for batch in batches(name):
            if 13 in batch.values:
                batch.fail(RuntimeError("unlucky"))
            else:
                batch.finish()

    def caller(start: int) -> None:
        for index in range(start, len(tickets), 4):
            images = [item(1 + index % 5, index % 251), item(1, (index + 1) % 251)]
            queue.batcher.reserve(tickets[index], sum(image.patches.num_tokens for image in images))
            queue.batcher.put(tickets[index], images)
            if start == 3:
                queue.batcher.cancel(tickets[index])

    callers = [threading.Thread(target=caller, args=(start,)) for start in range(4)]
    devices = [threading.Thread(target=device, args=(name,)) for name in names]
    for thread in (*devices, *callers):
        thread.start()
    for thread in callers:
        thread.join(30)
    eventually(lambda: all(ticket.ended for ticket in tickets))
    for index, ticket in enumerate(tickets):
        values = [index % 251, (index + 1) % 251]
        try:
            assert queue.answer(ticket) == values
            assert 13 not in values
        except InternalError:
            assert 13 in values
        except Abandoned:
            assert index % 4 == 3
    eventually(lambda: queue.batcher.is_idle)
    queue.assert_empty()
    queue.batcher.close()
    for thread in devices:
        thread.join(10)

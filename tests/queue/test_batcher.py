"""The queue between threads: waiting for batches, running them, handing out."""

from __future__ import annotations

import time

import torch

from models import DeviceError
from service.errors import (
    ApiError,
)
from tests.support.batcher import LOST, MakeQueue
from tests.support.queueing import item


def code_of(error: Exception) -> str:
    assert isinstance(error, ApiError), error
    return error.code


# Order and batches


def test_batch_is_taken_run_and_handed_out(make_queue: MakeQueue) -> None:
    queue = make_queue()
    tickets = [queue.put(item(4, 1), item(4, 2)), queue.put(item(4, 3))]
    first, second = queue.take(), queue.take()
    assert (queue.batcher.waiting_images, queue.batcher.waiting_tokens) == (0, 0)
    assert not queue.batcher.is_idle
    second.finish()
    first.finish()
    assert [queue.answer(ticket) for ticket in tickets] == [[1, 2], [3]]
    queue.assert_empty()
    assert [stats.num_images for stats in queue.observed] == [1, 2]
    assert queue.lost == []


def test_failed_batch_runs_again_one_image_at_a_time(make_queue: MakeQueue) -> None:
    queue = make_queue()
    ticket = queue.put(item(2, 1), item(2, 2))
    queue.take().fail(torch.OutOfMemoryError("CUDA out of memory"))
    for value in (1, 2):
        batch = queue.take()
        assert batch.values == [value]
        batch.finish()
    assert queue.answer(ticket) == [1, 2]
    assert queue.lost == []


def test_device_error_ends_only_the_requests_of_that_device(make_queue: MakeQueue) -> None:
    queue = make_queue("a", "b")
    lost, kept = queue.put(item(10, 1)), queue.put(item(10, 2))
    dying, working = queue.take("a"), queue.take("b")
    dying.fail(DeviceError("a", LOST))
    assert code_of(queue.callers.error(lost)) == "device_failed"
    assert queue.lost == ["a"]
    assert queue.batcher.is_lost("a")
    assert queue.batcher.take("a") is None
    working.finish()
    assert queue.answer(kept) == [2]
    queue.assert_empty()


# Waiting for more images


def test_idle_device_takes_an_image_at_once(make_queue: MakeQueue) -> None:
    queue = make_queue()
    taking = queue.waiting()
    queue.put(item(1, 7))
    batch = taking.result(10)
    assert batch is not None
    assert batch.values == [7]


def test_batch_waits_max_wait_s_for_more_images(make_queue: MakeQueue) -> None:
    queue = make_queue(max_wait_s=0.15)
    taking = queue.waiting()
    started = time.perf_counter()
    queue.put(item(1, 1))
    queue.put(item(1, 2))
    batch = taking.result(10)
    assert batch is not None
    assert batch.values == [1, 2]
    assert time.perf_counter() - started >= 0.15


def test_full_batch_does_not_wait(make_queue: MakeQueue) -> None:
    queue = make_queue(max_wait_s=3600.0)
    taking = queue.waiting()
    queue.put(item(4, 1))
    queue.put(item(6, 2))
    batch = taking.result(10)
    assert batch is not None
    assert batch.values == [1, 2]


def test_device_does_not_wait_if_a_batch_became_due_just_before(make_queue: MakeQueue) -> None:
    queue = make_queue()
    queue.put(item(1, 1))

    def wait() -> None:
        with queue.batcher._changed:
            queue.batcher._wait("a")

    queue._threads.submit(wait).result(10)


# Several devices


def test_idle_devices_share_the_waiting_images(make_queue: MakeQueue) -> None:
    queue = make_queue("a", "b", "c", max_batch_tokens=100)
    taking = [queue.waiting(name) for name in ("a", "b", "c")]
    ticket = queue.put(*[item(1, value) for value in range(9)])
    batches = [future.result(10) for future in taking]
    assert sorted(len(batch.items) for batch in batches if batch) == [3, 3, 3]
    for batch in batches:
        assert batch is not None
        batch.finish()
    assert queue.answer(ticket) == list(range(9))


def test_busy_device_leaves_a_batch_to_an_idle_one(make_queue: MakeQueue) -> None:
    queue = make_queue("a", "b")
    queue.put(item(1, 1))
    first = queue.take("a")
    busy, idle = queue.waiting("a"), queue.waiting("b")
    queue.put(item(1, 2))
    batch = idle.result(10)
    assert batch is not None
    assert not busy.done()
    queue.put(item(1, 3))
    prepared = busy.result(10)  # both devices are busy now
    assert prepared is not None
    for done in (first, batch, prepared):
        done.finish()
    queue.assert_empty()


def test_busy_device_takes_the_images_that_an_idle_one_leaves(make_queue: MakeQueue) -> None:
    queue = make_queue("a", "b")
    queue.put(item(1, 1))
    first = queue.take("a")
    queue.batcher._state.devices["b"].is_waiting = True  # but it wakes late, after the busy device
    queue.put(item(8, 2), item(8, 3))
    busy = queue.waiting("a")
    assert queue.take("b").values == [2]
    batch = busy.result(10)
    assert batch is not None
    assert batch.values == [3]
    first.finish()


def test_device_that_does_not_wait_for_a_batch_gets_no_share(make_queue: MakeQueue) -> None:
    queue = make_queue("a", "b", max_batch_tokens=100)
    waiting = queue.waiting("a")
    queue.put(item(1, 1))
    batch = waiting.result(10)
    assert batch is not None
    batch.finish()
    queue.put(*[item(1)] * 4)
    assert len(queue.take("b").items) == 4

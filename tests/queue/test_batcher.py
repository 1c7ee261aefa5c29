"""The queue with threads: waiting, waking, and the results of batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from models import BatchResult, BatchStats, DeviceError, EncodeItem
from service.errors import (
    ApiError,
    DeadlineExceeded,
    InternalError,
)
from service.queue.batcher import Batcher
from service.queue.queue_records import QueueLimits
from service.queue.ticket import Abandoned, Ticket
from tests.support.queueing import Callers, item, value_of
from tests.support.waiting import eventually

LOST = torch.AcceleratorError("illegal memory access")


class RunningJob:
    """A batch that a device has taken. The test ends it."""

    def __init__(self, device: str, items: Sequence[EncodeItem], future: Future[BatchResult]) -> None:
        self.device = device
        self.items = items
        self._future = future

    @property
    def values(self) -> list[int]:
        return [value_of(image) for image in self.items]

    @property
    def num_tokens(self) -> int:
        return sum(image.patches.num_tokens for image in self.items)

    def finish(self) -> None:
        """Ends the batch. Each embedding is the value of its image."""
        embeddings = tuple(torch.tensor([value]) for value in self.values)
        stats = BatchStats(self.device, len(self.items), self.num_tokens, 0, {}, {}, 0, 0.1)
        now = time.perf_counter()
        self._future.set_result(BatchResult(embeddings, (stats,), now, now))

    def fail(self, error: Exception) -> None:
        self._future.set_exception(error)


class Queue:
    """A queue with devices and callers."""

    def __init__(
        self,
        callers: Callers,
        devices: Sequence[str] = ("a",),
        *,
        max_batch_tokens: int = 10,
        max_queue_tokens: int = 100,
        max_wait_s: float = 0.0,
    ) -> None:
        self.callers = callers
        self.observed: list[BatchStats] = []
        self.lost: list[str] = []
        self.batcher = Batcher(
            QueueLimits(max_batch_tokens, max_queue_tokens, max_wait_s),
            observe=self.observed.append,
            on_lost=lambda error: self.lost.append(error.device),
        )
        for name in devices:
            self.batcher.add_device(name)
        self._threads = ThreadPoolExecutor(len(devices) + 1)

    def put(self, *images: EncodeItem, deadline: float = float("inf")) -> Ticket:
        return self.callers.put(self.batcher, *images, deadline=deadline)

    def take(self, device: str = "a") -> RunningJob:
        """Takes a batch in another thread, so that the test fails, rather than hangs, if there is none."""
        taken = self._threads.submit(self.batcher.take, device).result(10)
        assert taken is not None, "no more batches"
        return RunningJob(device, *taken)

    def waiting(self, device: str = "a") -> Future[RunningJob | None]:
        """Calls `take` in another thread, and returns once it waits."""

        def take() -> RunningJob | None:
            taken = self.batcher.take(device)
            return None if taken is None else RunningJob(device, *taken)

        future = self._threads.submit(take)
        eventually(lambda: self.batcher._state.devices[device].is_waiting)
        return future

    def wait(self, device: str = "a") -> Future[bool]:
        """Calls `Batcher.wait` in another thread."""
        return self._threads.submit(self.batcher.wait, device)

    def poll(self, device: str = "a", num_idle_others: int = 0) -> RunningJob | None:
        taken = self.batcher.poll(device, num_idle_others)
        return None if taken is None else RunningJob(device, *taken)

    def answer(self, ticket: Ticket) -> list[int]:
        return [int(embedding) for embedding in self.callers.outcome(ticket)]

    def assert_empty(self) -> None:
        assert (self.batcher.waiting_images, self.batcher.waiting_tokens) == (0, 0)
        assert self.batcher.reserved_tokens == 0
        assert self.batcher.is_idle

    def close(self) -> None:
        self.batcher.close()
        self._threads.shutdown()


Make = Callable[..., Queue]


@pytest.fixture
def make(callers: Callers) -> Iterator[Make]:
    made: list[Queue] = []

    def make_queue(
        *devices: str, max_batch_tokens: int = 10, max_queue_tokens: int = 100, max_wait_s: float = 0.0
    ) -> Queue:
        made.append(
            Queue(
                callers,
                devices or ("a",),
                max_batch_tokens=max_batch_tokens,
                max_queue_tokens=max_queue_tokens,
                max_wait_s=max_wait_s,
            )
        )
        return made[-1]

    yield make_queue
    for queue in made:
        queue.close()


def code_of(error: Exception) -> str:
    assert isinstance(error, ApiError), error
    return error.code


# Order and batches


def test_batch_is_taken_run_and_handed_out(make: Make) -> None:
    queue = make()
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


def test_failed_batch_runs_again_one_image_at_a_time(make: Make) -> None:
    queue = make()
    ticket = queue.put(item(2, 1), item(2, 2))
    queue.take().fail(torch.OutOfMemoryError("CUDA out of memory"))
    for value in (1, 2):
        batch = queue.take()
        assert batch.values == [value]
        batch.finish()
    assert queue.answer(ticket) == [1, 2]
    assert queue.lost == []


def test_device_error_ends_only_the_requests_of_that_device(make: Make) -> None:
    queue = make("a", "b")
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


def test_idle_device_takes_an_image_at_once(make: Make) -> None:
    queue = make()
    taking = queue.waiting()
    queue.put(item(1, 7))
    batch = taking.result(10)
    assert batch is not None
    assert batch.values == [7]


def test_batch_waits_max_wait_s_for_more_images(make: Make) -> None:
    queue = make(max_wait_s=0.15)
    taking = queue.waiting()
    started = time.perf_counter()
    queue.put(item(1, 1))
    queue.put(item(1, 2))
    batch = taking.result(10)
    assert batch is not None
    assert batch.values == [1, 2]
    assert time.perf_counter() - started >= 0.15


def test_full_batch_does_not_wait(make: Make) -> None:
    queue = make(max_wait_s=3600.0)
    taking = queue.waiting()
    queue.put(item(4, 1))
    queue.put(item(6, 2))
    batch = taking.result(10)
    assert batch is not None
    assert batch.values == [1, 2]


def test_device_does_not_wait_if_a_batch_became_due_just_before(make: Make) -> None:
    queue = make()
    queue.put(item(1, 1))

    def wait() -> None:
        with queue.batcher._changed:
            queue.batcher._wait("a")

    queue._threads.submit(wait).result(10)


# Several devices


def test_idle_devices_share_the_waiting_images(make: Make) -> None:
    queue = make("a", "b", "c", max_batch_tokens=100)
    taking = [queue.waiting(name) for name in ("a", "b", "c")]
    ticket = queue.put(*[item(1, value) for value in range(9)])
    batches = [future.result(10) for future in taking]
    assert sorted(len(batch.items) for batch in batches if batch) == [3, 3, 3]
    for batch in batches:
        assert batch is not None
        batch.finish()
    assert queue.answer(ticket) == list(range(9))


def test_busy_device_leaves_a_batch_to_an_idle_one(make: Make) -> None:
    queue = make("a", "b")
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


def test_busy_device_takes_the_images_that_an_idle_one_leaves(make: Make) -> None:
    queue = make("a", "b")
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


def test_device_that_does_not_wait_for_a_batch_gets_no_share(make: Make) -> None:
    queue = make("a", "b", max_batch_tokens=100)
    waiting = queue.waiting("a")
    queue.put(item(1, 1))
    batch = waiting.result(10)
    assert batch is not None
    batch.finish()
    queue.put(*[item(1)] * 4)
    assert len(queue.take("b").items) == 4


# Devices in other processes, which call `wait` and `poll`


def test_wait_takes_nothing_and_poll_forms_the_batch(make: Make) -> None:
    queue = make()
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


def test_poll_returns_none_if_no_image_waits(make: Make) -> None:
    queue = make()
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


def test_poll_ends_requests_past_their_deadline(make: Make) -> None:
    queue = make()
    late = queue.put(item(1, 1), deadline=time.perf_counter() - 1)
    in_time = queue.put(item(1, 2))
    assert queue.wait().result(10)
    batch = queue.poll()
    assert batch is not None
    batch.finish()
    assert isinstance(queue.callers.error(late), DeadlineExceeded)
    assert queue.answer(in_time) == [2]


def test_device_inside_wait_is_not_idle(make: Make) -> None:
    """It may be busy with batches of other API servers."""
    queue = make("a", "b", max_batch_tokens=100)
    waiting = queue.wait("b")
    queue.put(*[item(1, value) for value in range(4)])
    assert waiting.result(10)
    assert queue.take("a").values == [0, 1, 2, 3]


def test_poll_returns_none_once_the_request_is_cancelled(make: Make) -> None:
    queue = make("a", "b", max_batch_tokens=100)
    ticket = queue.put(item(1, 1))
    assert queue.wait("b").result(10)
    queue.batcher.cancel(ticket)
    assert queue.poll("b") is None
    queue.put(item(1, 2), item(1, 3))
    assert queue.wait("a").result(10)
    batch = queue.poll("a")
    assert batch is not None
    assert batch.values == [2, 3]


def test_wait_and_poll_respect_max_wait_s(make: Make) -> None:
    queue = make(max_wait_s=3600.0)
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
    make: Make, is_lost: bool, has_images: bool
) -> None:
    queue = make("a", "b")
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


def test_retry_wakes_a_waiting_device(make: Make) -> None:
    queue = make()
    queue.put(item(2, 1), item(2, 2))
    batch = queue.take()
    waiting = queue.waiting()
    batch.fail(RuntimeError("odd shape"))
    again = waiting.result(10)
    assert again is not None
    assert again.values == [1]


# Devices that fail


def test_device_is_lost_once(make: Make) -> None:
    queue = make()
    queue.put(item(10), item(10))
    batches = [queue.take(), queue.take()]
    for batch in batches:
        batch.fail(DeviceError("a", LOST))
    assert queue.lost == ["a"]


def test_lost_device_is_not_idle(make: Make) -> None:
    queue = make("a", "b", max_batch_tokens=100)
    lost = queue.waiting("b")
    queue.batcher.lose("b", DeviceError("b", LOST))
    assert lost.result(10) is None
    queue.batcher._state.devices["b"].is_waiting = True  # as if its thread had been killed while it waited
    queue.put(*[item(1)] * 4)
    assert len(queue.take("a").items) == 4


def test_close_makes_take_return(make: Make) -> None:
    queue = make("a", "b")
    taking = [queue.waiting(name) for name in ("a", "b")]
    queue.batcher.close()
    assert [future.result(10) for future in taking] == [None, None]


# Random histories


@pytest.mark.parametrize("uses_poll", [False, True])
def test_many_threads_lose_no_request_and_leave_nothing_reserved(make: Make, uses_poll: bool) -> None:
    """Each device and each caller has a thread. One of the four callers cancels its requests."""
    names = ("a", "b", "c")
    queue = make(*names, max_batch_tokens=16, max_queue_tokens=10**6)
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

"""The queue with devices that do what the test says, and a state machine over random histories of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest
import torch
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from models import BatchResult, BatchStats, DeviceError, EncodeItem
from service.errors import (
    ApiError,
    DeadlineExceeded,
    InternalError,
    TooLarge,
    TooManyRequests,
    Unavailable,
)
from service.queue.batcher import Batcher
from service.queue.queue_records import QueueLimits
from service.queue.ticket import Abandoned, Ticket
from tests.support.queueing import Callers, item, value_of
from tests.support.waiting import eventually

LOST = torch.AcceleratorError("illegal memory access")


class Batch:
    """What a device has taken, until the test ends it."""

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
        """Each embedding is the value of its image."""
        embeddings = tuple(torch.tensor([value]) for value in self.values)
        stats = BatchStats(self.device, len(self.items), self.num_tokens, 0, {}, {}, 0, 0.1)
        now = time.perf_counter()
        self._future.set_result(BatchResult(embeddings, (stats,), now, now))

    def fail(self, error: Exception) -> None:
        self._future.set_exception(error)


class Queue:
    """A queue with devices, and callers that wait for it."""

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

    def take(self, device: str = "a") -> Batch:
        """In another thread, so that a queue that gives nothing cannot hold the test up."""
        taken = self._threads.submit(self.batcher.take, device).result(10)
        assert taken is not None, "the queue has no more"
        return Batch(device, *taken)

    def waiting(self, device: str = "a") -> Future[Batch | None]:
        """A device that has come for a batch and got none yet."""

        def take() -> Batch | None:
            taken = self.batcher.take(device)
            return None if taken is None else Batch(device, *taken)

        future = self._threads.submit(take)
        eventually(lambda: self.batcher._devices[device].is_waiting)
        return future

    def wait(self, device: str = "a") -> Future[bool]:
        """A device that waits for its turn."""
        return self._threads.submit(self.batcher.wait, device)

    def poll(self, device: str = "a", num_idle_others: int = 0) -> Batch | None:
        taken = self.batcher.poll(device, num_idle_others)
        return None if taken is None else Batch(device, *taken)

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


def test_first_in_first_out_up_to_the_tokens_of_a_batch(make: Make) -> None:
    queue = make()
    tickets = [queue.put(item(4, 1), item(4, 2)), queue.put(item(4, 3)), queue.put(item(1, 4))]
    first, second = queue.take(), queue.take()
    assert [first.values, second.values] == [[1, 2], [3, 4]]  # nobody overtakes, even where there is room
    second.finish()
    first.finish()
    assert [queue.answer(ticket) for ticket in tickets] == [[1, 2], [3], [4]]
    queue.assert_empty()
    assert [stats.num_images for stats in queue.observed] == [2, 2]


def test_an_image_larger_than_a_batch_is_a_batch_of_its_own(make: Make) -> None:
    queue = make()
    queue.put(item(1, 1), item(25, 2), item(1, 3))
    assert [queue.take().values for _ in range(3)] == [[1], [2], [3]]


def test_a_request_may_be_spread_over_batches(make: Make) -> None:
    queue = make()
    ticket = queue.put(*[item(6, value) for value in range(3)])
    batches = [queue.take() for _ in range(3)]
    for batch in reversed(batches):
        assert not ticket.ended
        batch.finish()
    assert queue.answer(ticket) == [0, 1, 2]


def test_gauges_say_what_waits(make: Make) -> None:
    queue = make("a", "b", max_queue_tokens=50)
    assert queue.batcher.limit_tokens == 100
    ticket = queue.callers.ticket()
    queue.batcher.admit(ticket, 12)
    assert (queue.batcher.waiting_images, queue.batcher.waiting_tokens) == (0, 0)
    queue.batcher.put(ticket, [item(8), item(4)])
    assert (queue.batcher.waiting_images, queue.batcher.waiting_tokens) == (2, 12)
    batch = queue.take()
    assert (queue.batcher.waiting_images, queue.batcher.waiting_tokens) == (1, 4)
    assert not queue.batcher.is_idle
    rest = queue.take()
    assert not queue.batcher.is_idle
    batch.finish()
    rest.finish()
    queue.assert_empty()


# Waiting for more


def test_an_idle_device_takes_what_comes_at_once(make: Make) -> None:
    queue = make()
    taking = queue.waiting()
    queue.put(item(1, 7))
    batch = taking.result(10)
    assert batch is not None
    assert batch.values == [7]


def test_a_batch_waits_for_more_for_a_while_where_it_should(make: Make) -> None:
    queue = make(max_wait_s=0.15)
    taking = queue.waiting()
    started = time.perf_counter()
    queue.put(item(1, 1))
    queue.put(item(1, 2))
    batch = taking.result(10)
    assert batch is not None
    assert batch.values == [1, 2]
    assert time.perf_counter() - started >= 0.15


def test_a_full_batch_waits_for_nothing(make: Make) -> None:
    queue = make(max_wait_s=3600.0)
    taking = queue.waiting()
    queue.put(item(4, 1))
    queue.put(item(6, 2))
    batch = taking.result(10)
    assert batch is not None
    assert batch.values == [1, 2]


def test_what_becomes_due_just_before_a_device_would_wait_is_not_waited_for(make: Make) -> None:
    queue = make()
    queue.put(item(1, 1))

    def wait() -> None:
        with queue.batcher._changed:
            queue.batcher._wait(queue.batcher._devices["a"])

    queue._threads.submit(wait).result(10)


# Several devices


def test_idle_devices_share_what_waits(make: Make) -> None:
    queue = make("a", "b", "c", max_batch_tokens=100)
    taking = [queue.waiting(name) for name in ("a", "b", "c")]
    ticket = queue.put(*[item(1, value) for value in range(9)])
    batches = [future.result(10) for future in taking]
    assert sorted(len(batch.items) for batch in batches if batch) == [3, 3, 3]
    for batch in batches:
        assert batch is not None
        batch.finish()
    assert queue.answer(ticket) == list(range(9))


def test_a_busy_device_leaves_a_batch_to_an_idle_one(make: Make) -> None:
    queue = make("a", "b")
    queue.put(item(1, 1))
    first = queue.take("a")
    busy, idle = queue.waiting("a"), queue.waiting("b")
    queue.put(item(1, 2))
    batch = idle.result(10)
    assert batch is not None
    assert not busy.done()
    queue.put(item(1, 3))
    prepared = busy.result(10)  # now both are busy
    assert prepared is not None
    for done in (first, batch, prepared):
        done.finish()
    queue.assert_empty()


def test_what_an_idle_device_leaves_goes_to_a_busy_one(make: Make) -> None:
    queue = make("a", "b")
    queue.put(item(1, 1))
    first = queue.take("a")
    queue.batcher._devices["b"].is_waiting = True  # and slow to wake up: the busy one looks first
    queue.put(item(8, 2), item(8, 3))
    busy = queue.waiting("a")
    assert queue.take("b").values == [2]
    batch = busy.result(10)
    assert batch is not None
    assert batch.values == [3]
    first.finish()


def test_a_device_that_does_not_come_for_a_batch_gets_no_share(make: Make) -> None:
    queue = make("a", "b", max_batch_tokens=100)
    waiting = queue.waiting("a")
    queue.put(item(1, 1))
    batch = waiting.result(10)
    assert batch is not None
    batch.finish()
    queue.put(*[item(1)] * 4)
    assert len(queue.take("b").items) == 4


# Devices that are granted their turn by another process


def test_a_device_waits_until_there_is_a_batch_which_is_formed_when_it_is_its_turn(make: Make) -> None:
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


def test_there_may_be_nothing_left_when_it_is_its_turn(make: Make) -> None:
    queue = make()
    assert queue.poll() is None
    ticket = queue.put(item(1, 1))
    assert queue.wait().result(10)
    queue.batcher.leave(ticket)
    assert queue.poll() is None
    queue.assert_empty()
    waiting = queue.wait()
    queue.put(item(1, 2))
    assert waiting.result(10)
    batch = queue.poll()
    assert batch is not None
    assert batch.values == [2]


def test_who_is_past_its_deadline_is_ended_when_it_is_its_turn(make: Make) -> None:
    queue = make()
    late = queue.put(item(1, 1), deadline=time.perf_counter() - 1)
    in_time = queue.put(item(1, 2))
    assert queue.wait().result(10)
    batch = queue.poll()
    assert batch is not None
    batch.finish()
    assert isinstance(queue.callers.error(late), DeadlineExceeded)
    assert queue.answer(in_time) == [2]


@pytest.mark.parametrize(("num_idle_others", "share"), [(0, 6), (1, 3), (2, 2), (9, 1)])
def test_a_device_leaves_their_shares_to_others_that_have_nothing_to_do(
    make: Make, num_idle_others: int, share: int
) -> None:
    queue = make("a", "b", max_batch_tokens=100)
    ticket = queue.put(*[item(1, value) for value in range(6)])
    assert queue.wait("a").result(10)
    batch = queue.poll("a", num_idle_others)
    assert batch is not None
    assert batch.values == list(range(share))
    batch.finish()
    for rest in iter(partial(queue.poll, "b"), None):
        rest.finish()
    assert queue.answer(ticket) == list(range(6))


def test_a_device_that_waits_for_a_turn_is_not_taken_for_idle(make: Make) -> None:
    """It may be busy for others."""
    queue = make("a", "b", max_batch_tokens=100)
    waiting = queue.wait("b")
    queue.put(*[item(1, value) for value in range(4)])
    assert waiting.result(10)
    assert queue.take("a").values == [0, 1, 2, 3]


def test_a_turn_comes_to_nothing_where_the_caller_has_left(make: Make) -> None:
    queue = make("a", "b", max_batch_tokens=100)
    ticket = queue.put(item(1, 1))
    assert queue.wait("b").result(10)
    queue.batcher.leave(ticket)
    assert queue.poll("b") is None
    queue.put(item(1, 2), item(1, 3))
    assert queue.wait("a").result(10)
    batch = queue.poll("a")
    assert batch is not None
    assert batch.values == [2, 3]


def test_a_turn_is_not_wanted_before_a_batch_is_due(make: Make) -> None:
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
def test_a_device_that_is_lost_or_told_to_end_gets_no_more_turns(
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


# Admission


def test_a_request_is_admitted_whole_or_not_at_all(make: Make) -> None:
    queue = make(max_queue_tokens=20)
    queue.put(item(8), item(7))
    with pytest.raises(TooManyRequests) as caught:
        queue.put(item(3), item(3))
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    assert queue.batcher.reserved_tokens == 15
    queue.put(item(5))
    with pytest.raises(TooManyRequests):
        queue.batcher.check_room()
    queue.take()  # what a device has taken no longer counts
    queue.batcher.check_room()
    queue.put(item(8))


def test_what_is_admitted_and_not_queued_yet_holds_its_room(make: Make) -> None:
    queue = make(max_queue_tokens=20)
    ticket = queue.callers.ticket()
    queue.batcher.admit(ticket, 20)
    with pytest.raises(TooManyRequests):
        queue.batcher.check_room()
    queue.batcher.leave(ticket)
    queue.batcher.check_room()
    queue.batcher.put(ticket, [item(20)])
    queue.assert_empty()


def test_more_than_could_ever_fit_is_too_large(make: Make) -> None:
    queue = make("a", "b", max_queue_tokens=20)
    queue.put(item(39))
    with pytest.raises(TooLarge) as caught:
        queue.put(item(41))
    assert (caught.value.status, caught.value.code) == (413, "too_many_tokens")
    assert "41 tokens" in str(caught.value)
    assert "40" in str(caught.value)


def test_a_request_that_ended_while_it_was_prepared_reserves_nothing(make: Make) -> None:
    queue = make()
    ticket = queue.callers.ticket()
    queue.batcher.leave(ticket)
    queue.batcher.admit(ticket, 5)
    queue.batcher.put(ticket, [item(5)])
    queue.assert_empty()


@pytest.mark.parametrize(
    ("tokens_per_s", "seconds"), [(0.0, 1), (1e9, 1), (50.0, 2), (30.0, 4), (10.0, 10), (0.1, 10)]
)
def test_retry_after_is_the_time_that_the_queue_takes(make: Make, tokens_per_s: float, seconds: int) -> None:
    queue = make(max_queue_tokens=100)
    queue.batcher._devices["a"].tokens_per_s = tokens_per_s
    queue.put(item(100))
    with pytest.raises(TooManyRequests) as caught:
        queue.put(item(1))
    assert caught.value.headers() == {"Retry-After": str(seconds)}


def test_a_device_that_is_lost_takes_nothing_from_the_queue_any_more(make: Make) -> None:
    queue = make("a", "b", max_queue_tokens=100)
    for name, tokens_per_s in (("a", 1000.0), ("b", 50.0)):
        queue.batcher._devices[name].tokens_per_s = tokens_per_s
    queue.put(item(200))
    queue.batcher.lose("a", DeviceError("a", LOST))
    with pytest.raises(TooManyRequests) as caught:
        queue.put(item(1))
    assert caught.value.retry_after_s == 4


def test_the_rate_of_a_device_is_measured(make: Make) -> None:
    queue = make(max_queue_tokens=1000, max_batch_tokens=50)
    queue.put(item(50))
    batch = queue.take()
    time.sleep(0.05)  # at most 1000 tokens a second
    batch.finish()
    queue.put(*[item(500), item(500)])
    with pytest.raises(TooManyRequests) as caught:
        queue.batcher.check_room()
    assert caught.value.retry_after_s is not None
    assert 1 <= caught.value.retry_after_s <= 10
    assert 0 < queue.batcher._devices["a"].tokens_per_s <= 1000


# Ends before the answer


def test_who_leaves_is_skipped_and_gives_the_room_back(make: Make) -> None:
    queue = make()
    leaving, staying = queue.put(item(4, 1), item(4, 2)), queue.put(item(4, 3))
    queue.batcher.leave(leaving)
    assert (queue.batcher.waiting_images, queue.batcher.reserved_tokens) == (1, 4)
    batch = queue.take()
    assert batch.values == [3]
    batch.finish()
    assert queue.answer(staying) == [3]
    assert isinstance(queue.callers.error(leaving), Abandoned)
    queue.assert_empty()


def test_who_leaves_while_a_device_works_disturbs_no_neighbour(make: Make) -> None:
    queue = make()
    leaving, staying = queue.put(item(1, 1), item(20, 2)), queue.put(item(1, 3))
    batch = queue.take()
    queue.batcher.leave(leaving)
    assert queue.batcher.waiting_images == 1
    batch.finish()
    last = queue.take()
    assert last.values == [3]
    last.finish()
    assert queue.answer(staying) == [3]
    queue.assert_empty()


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_who_left_gets_nothing_and_keeps_nothing_from_who_shares_the_batch(
    order: tuple[int, int], make: Make
) -> None:
    queue = make()
    tickets = {value: queue.put(item(1, value)) for value in order}
    batch = queue.take()
    queue.batcher.leave(tickets[1])
    batch.finish()
    assert queue.answer(tickets[2]) == [2]
    assert isinstance(queue.callers.error(tickets[1]), Abandoned)
    queue.assert_empty()


def test_an_end_is_the_only_one(make: Make) -> None:
    queue = make()
    ticket = queue.put(item(1, 5))
    batch = queue.take()
    batch.finish()
    queue.batcher.fail(ticket, DeadlineExceeded())
    queue.batcher.leave(ticket)
    assert queue.answer(ticket) == [5]
    failed = queue.put(item(1))
    queue.batcher.fail(failed, DeadlineExceeded())
    queue.batcher.leave(failed)
    assert code_of(queue.callers.error(failed)) == "deadline_exceeded"


def test_deadlines_are_checked_when_it_is_taken_from_the_queue(make: Make) -> None:
    queue = make()
    now = time.perf_counter()
    late = [queue.put(item(1), item(1), deadline=now), queue.put(item(1), deadline=now - 1)]
    in_time = queue.put(item(1, 9), deadline=now + 60)
    batch = queue.take()
    assert batch.values == [9]
    batch.finish()
    assert {code_of(queue.callers.error(ticket)) for ticket in late} == {"deadline_exceeded"}
    assert queue.answer(in_time) == [9]
    queue.assert_empty()


# Batches that fail


def test_a_batch_that_fails_is_run_again_one_by_one_before_all_others(make: Make) -> None:
    queue = make()
    tickets = [queue.put(item(2, 1), item(2, 2)), queue.put(item(2, 3))]
    batch = queue.take()
    waiting = queue.put(item(2, 4))
    batch.fail(torch.OutOfMemoryError("CUDA out of memory"))
    again = [queue.take() for _ in range(3)]
    assert [batch.values for batch in again] == [[1], [2], [3]]
    again[0].finish()
    again[1].fail(RuntimeError("odd shape"))
    again[2].finish()
    error = queue.callers.error(tickets[0])
    assert isinstance(error, InternalError)
    assert (error.code, error.param) == ("internal_error", "images[1]")
    assert str(error.__cause__) == "odd shape"
    assert queue.answer(tickets[1]) == [3]
    queue.take().finish()
    assert queue.answer(waiting) == [4]
    queue.assert_empty()
    assert queue.lost == []


def test_a_device_that_waits_for_more_to_do_is_told_of_what_is_run_again(make: Make) -> None:
    queue = make()
    queue.put(item(2, 1), item(2, 2))
    batch = queue.take()
    waiting = queue.waiting()
    batch.fail(RuntimeError("odd shape"))
    again = waiting.result(10)
    assert again is not None
    assert again.values == [1]


def test_an_image_alone_that_fails_is_not_run_again(make: Make) -> None:
    queue = make()
    ticket = queue.put(item(2, 1))
    queue.take().fail(RuntimeError("odd shape"))
    assert code_of(queue.callers.error(ticket)) == "internal_error"
    queue.assert_empty()


def test_who_left_is_not_run_again(make: Make) -> None:
    queue = make()
    leaving, staying = queue.put(item(2, 1)), queue.put(item(2, 2))
    batch = queue.take()
    queue.batcher.leave(leaving)
    batch.fail(RuntimeError("odd shape"))
    assert queue.batcher.waiting_images == 1
    queue.take().finish()
    assert queue.answer(staying) == [2]
    queue.assert_empty()


def test_who_leaves_before_it_is_run_again_is_skipped(make: Make) -> None:
    queue = make()
    leaving = queue.put(item(2, 1), item(2, 2))
    queue.take().fail(RuntimeError("odd shape"))
    assert (queue.batcher.waiting_images, queue.batcher.waiting_tokens) == (2, 4)
    assert queue.batcher.reserved_tokens == 0
    queue.batcher.leave(leaving)
    queue.assert_empty()


# Devices that fail


def test_the_requests_of_a_lost_device_end_and_the_others_go_on(make: Make) -> None:
    queue = make("a", "b")
    lost, kept = queue.put(item(10, 1), item(10, 2)), queue.put(item(10, 3))
    dying, working = queue.take("a"), queue.take("b")
    assert [dying.values, working.values] == [[1], [2]]
    dying.fail(DeviceError("a", LOST))
    assert code_of(queue.callers.error(lost)) == "device_failed"
    assert queue.lost == ["a"]
    assert queue.batcher.is_lost("a")
    working.finish()
    assert queue.batcher.take("a") is None
    last = queue.take("b")
    assert last.values == [3]
    last.finish()
    assert queue.answer(kept) == [3]
    queue.assert_empty()


def test_with_the_last_device_everyone_who_waits_is_answered(make: Make) -> None:
    queue = make("a", "b")
    tickets = [queue.put(item(10)) for _ in range(4)]
    prepared = queue.callers.ticket()
    queue.batcher.admit(prepared, 10)
    for name in ("a", "b"):
        queue.take(name).fail(DeviceError(name, LOST))
    queue.batcher.put(prepared, [item(10)])
    errors = [queue.callers.error(ticket) for ticket in (*tickets, prepared)]
    assert {code_of(error) for error in errors} == {"device_failed"}
    with pytest.raises(Unavailable):
        queue.put(item(1))
    queue.assert_empty()


def test_a_device_is_lost_once(make: Make) -> None:
    queue = make()
    queue.put(item(10), item(10))
    batches = [queue.take(), queue.take()]
    for batch in batches:
        batch.fail(DeviceError("a", LOST))
    assert queue.lost == ["a"]


def test_a_device_that_has_work_and_finishes_none_is_stuck(make: Make) -> None:
    queue = make("a", "b")
    queue.put(item(10), item(10))
    batch = queue.take("a")
    time.sleep(0.02)
    assert queue.batcher.stuck_devices(0.01) == ["a"]
    assert queue.batcher.stuck_devices(60.0) == []
    other = queue.take("a")
    assert queue.batcher.stuck_devices(0.01) == ["a"]  # more work is no progress
    batch.finish()
    assert queue.batcher.stuck_devices(0.01) == []
    other.finish()
    time.sleep(0.02)
    assert queue.batcher.stuck_devices(0.01) == []


@pytest.mark.parametrize("end", [Batch.finish, lambda batch: batch.fail(RuntimeError("late"))])
def test_a_device_that_was_given_up_may_still_finish(
    make: Make, end: Callable[[Batch], None], caplog: pytest.LogCaptureFixture
) -> None:
    queue = make()
    ticket = queue.put(item(1), item(1))
    batch = queue.take()
    queue.batcher.lose("a", DeviceError("a", TimeoutError("stuck")))
    assert code_of(queue.callers.error(ticket)) == "device_failed"
    end(batch)
    assert caplog.records == []
    queue.assert_empty()


def test_a_lost_device_is_no_idle_one(make: Make) -> None:
    queue = make("a", "b", max_batch_tokens=100)
    lost = queue.waiting("b")
    queue.batcher.lose("b", DeviceError("b", LOST))
    assert lost.result(10) is None
    queue.batcher._devices["b"].is_waiting = True  # as its thread was killed in the middle
    queue.put(*[item(1)] * 4)
    assert len(queue.take("a").items) == 4


def test_closing_lets_devices_go(make: Make) -> None:
    queue = make("a", "b")
    taking = [queue.waiting(name) for name in ("a", "b")]
    queue.batcher.close()
    assert [future.result(10) for future in taking] == [None, None]


# Random histories


class History(RuleBasedStateMachine):
    """Requests and devices do what they can do, in any order; a model knows who must have got what."""

    def __init__(self, num_devices: int) -> None:
        super().__init__()
        self.callers = Callers()
        self.devices = [f"d{index}" for index in range(num_devices)]
        self.queue = Queue(self.callers, self.devices, max_batch_tokens=10, max_queue_tokens=40)
        self.batches: list[Batch] = []
        self.admitted: list[tuple[Ticket, list[EncodeItem]]] = []
        self.queued: list[tuple[Ticket, list[EncodeItem]]] = []
        self.poisoned: set[int] = set()  # values of images that fail whenever they run
        self.next_value = 0
        self.last_started = -1  # the highest value that a device took for the first time

    @property
    def alive(self) -> list[str]:
        return [name for name in self.devices if not self.queue.batcher.is_lost(name)]

    def images(self, sizes: list[int]) -> list[EncodeItem]:
        self.next_value += len(sizes)
        first = self.next_value - len(sizes)
        return [item(size, (first + i) % 251) for i, size in enumerate(sizes)]

    @precondition(lambda self: self.alive)
    @rule(sizes=st.lists(st.integers(1, 15), min_size=1, max_size=4), poison=st.booleans(), data=st.data())
    def admit(self, sizes: list[int], poison: bool, data: st.DataObject) -> None:
        batcher = self.queue.batcher
        ticket, images = self.callers.ticket(), self.images(sizes)
        room = batcher.limit_tokens - batcher.reserved_tokens
        if sum(sizes) > batcher.limit_tokens:
            with pytest.raises(TooLarge):
                batcher.admit(ticket, sum(sizes))
        elif sum(sizes) > room:
            with pytest.raises(TooManyRequests) as caught:
                batcher.admit(ticket, sum(sizes))
            assert 1 <= (caught.value.retry_after_s or 0) <= 10
        else:
            batcher.admit(ticket, sum(sizes))
            self.admitted.append((ticket, images))
            if poison:
                self.poisoned.add(value_of(data.draw(st.sampled_from(images))))

    @precondition(lambda self: self.admitted)
    @rule()
    def put(self) -> None:
        ticket, images = self.admitted.pop(0)
        self.queue.batcher.put(ticket, images)
        self.queued.append((ticket, images))

    @precondition(lambda self: self.admitted or self.queued)
    @rule(data=st.data(), late=st.booleans())
    def end_early(self, data: st.DataObject, late: bool) -> None:
        ticket, _ = data.draw(st.sampled_from(self.admitted + self.queued))
        if late:
            self.queue.batcher.fail(ticket, DeadlineExceeded())
        else:
            self.queue.batcher.leave(ticket)

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        ticket, _ = data.draw(st.sampled_from(self.queued))
        ticket.deadline = 0.0

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        if any(ticket.deadline > 0 and not ticket.ended for ticket in self.waiting_tickets()):
            batch = self.queue.take(data.draw(st.sampled_from(self.alive)))
            assert batch.num_tokens <= 10 or len(batch.items) == 1
            self.batches.append(batch)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), does_one_leave=st.booleans())
    def have_turns(self, data: st.DataObject, does_one_leave: bool) -> None:
        batcher = self.queue.batcher
        wanting = []
        for name in data.draw(st.permutations(self.alive)):
            if batcher._due_in_s() == 0:
                assert batcher.wait(name)
                wanting.append(name)
        if does_one_leave and self.queued:
            batcher.leave(data.draw(st.sampled_from(self.queued))[0])
        for name in wanting:
            batch = self.queue.poll(name)
            if batch is not None:
                assert batch.num_tokens <= 10 or len(batch.items) == 1
                self.batches.append(batch)

    def waiting_tickets(self) -> set[Ticket]:
        return {entry.ticket for entry in self.queue.batcher._waiting}

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def end_batch(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.batches))
        self.batches.remove(batch)
        self.run(batch)

    def run(self, batch: Batch) -> None:
        if self.poisoned & set(batch.values):
            batch.fail(RuntimeError("poison"))
        else:
            batch.finish()

    @precondition(lambda self: len(self.alive) > 1 or self.next_value > 10)
    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.alive))
        self.queue.batcher.lose(name, DeviceError(name, LOST))

    @invariant()
    def reservations_are_those_of_who_has_not_started(self) -> None:
        batcher = self.queue.batcher
        assert 0 <= batcher.reserved_tokens <= batcher.limit_tokens
        assert batcher.waiting_tokens == sum(entry.num_tokens for entry in batcher._waiting)
        tickets = [ticket for ticket, _ in self.admitted + self.queued]
        assert batcher.reserved_tokens == sum(t.reserved_tokens for t in tickets if not t.ended)

    def teardown(self) -> None:
        """Lets all that can go on go on; then everyone has one answer, and nothing is left."""
        try:
            while self.admitted:
                self.put()
            while self.batches:
                self.run(self.batches.pop())
            while self.alive and any(ticket.deadline > 0 for ticket in self.waiting_tickets()):
                self.run(self.queue.take(self.alive[0]))
            for ticket, _ in self.queued:
                if not ticket.ended:  # only such as would be found late when they are taken
                    assert ticket.deadline == 0
                    self.queue.batcher.fail(ticket, DeadlineExceeded())
            self.queue.assert_empty()
            assert self.queue.batcher._entries == {}
            for ticket, images in self.queued:
                self.check(ticket, [value_of(image) for image in images])
        finally:
            self.queue.close()
            self.callers.close()

    def check(self, ticket: Ticket, values: list[int]) -> None:
        try:
            assert self.queue.answer(ticket) == values
            assert not self.poisoned & set(values)
        except InternalError as error:
            index = int((error.param or "").removeprefix("images[").removesuffix("]"))
            assert values[index] in self.poisoned
        except Unavailable:
            assert self.queue.lost
        except (Abandoned, DeadlineExceeded):
            pass


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_no_history_loses_a_request_or_answers_one_twice(num_devices: int) -> None:
    run_state_machine_as_test(
        partial(History, num_devices),  # type: ignore[arg-type]  # any factory will do
        settings=hypothesis_settings(
            derandomize=True, max_examples=60, stateful_step_count=40, deadline=None
        ),
    )


@pytest.mark.parametrize("is_in_turn", [False, True])
def test_threads_that_do_all_of_it_at_once(make: Make, is_in_turn: bool) -> None:
    """Devices in threads of their own, callers in others; every fourth caller leaves."""
    names = ("a", "b", "c")
    queue = make(*names, max_batch_tokens=16, max_queue_tokens=10**6)
    tickets = [queue.callers.ticket() for _ in range(400)]

    def batches(name: str) -> Iterator[Batch]:
        if is_in_turn:
            while queue.batcher.wait(name):
                if batch := queue.poll(name):
                    yield batch
        else:
            while taken := queue.batcher.take(name):
                yield Batch(name, *taken)

    def device(name: str) -> None:
        for batch in batches(name):
            if 13 in batch.values:
                batch.fail(RuntimeError("unlucky"))
            else:
                batch.finish()

    def caller(start: int) -> None:
        for index in range(start, len(tickets), 4):
            images = [item(1 + index % 5, index % 251), item(1, (index + 1) % 251)]
            queue.batcher.admit(tickets[index], sum(image.patches.num_tokens for image in images))
            queue.batcher.put(tickets[index], images)
            if start == 3:
                queue.batcher.leave(tickets[index])

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

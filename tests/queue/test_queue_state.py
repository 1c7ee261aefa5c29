"""The policy of the queue, without threads or a clock, in single steps and in random histories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

from models import BatchResult, EncodeItem
from service.errors import (
    ApiError,
    DeadlineExceeded,
    InternalError,
    TooLarge,
    TooManyRequests,
    Unavailable,
)
from service.queue.queue_records import QueueLimits, TakenBatch
from service.queue.queue_state import QueueState
from service.queue.tally import OwnTally
from service.queue.ticket import Abandoned, Ticket, settle
from tests.support.queueing import Callers, item, value_of

NEVER = float("inf")


class Queue:
    """A queue state with devices and callers. Its time is `now`, in seconds."""

    def __init__(
        self,
        callers: Callers,
        devices: Sequence[str] = ("a",),
        *,
        max_batch_tokens: int = 10,
        max_queue_tokens: int = 100,
    ) -> None:
        self.callers = callers
        self.now = 1000.0
        self.state = QueueState(QueueLimits(max_batch_tokens, max_queue_tokens), OwnTally())
        for name in devices:
            self.state.add_device(name)

    def reserve(self, ticket: Ticket, num_tokens: int) -> None:
        self.state.reserve(ticket, num_tokens)

    def enqueue(self, ticket: Ticket, images: Sequence[EncodeItem]) -> None:
        self.state.put(ticket, images, self.now)
        self.wake()

    def put(self, *images: EncodeItem, deadline: float = NEVER) -> Ticket:
        """Reserves the tokens of a request and queues its images. Returns its ticket."""
        ticket = self.callers.ticket(deadline)
        self.reserve(ticket, sum(image.patches.num_tokens for image in images))
        self.enqueue(ticket, images)
        return ticket

    def poll(self, device: str = "a", num_idle_others: int | None = None) -> Batch | None:
        if num_idle_others is None:
            num_idle_others = self.state.num_idle_others(device)
        taken = self.state.take(device, num_idle_others, self.now)
        self.wake()
        return None if taken is None else Batch(self, device, taken)

    def take(self, device: str = "a") -> Batch:
        batch = self.poll(device)
        assert batch is not None, "nothing to take"
        return batch

    def end(self, ticket: Ticket, error: Exception) -> None:
        self.state.end(ticket, error)
        self.wake()

    def cancel(self, ticket: Ticket) -> None:
        self.end(ticket, Abandoned())

    def lose(self, device: str) -> bool:
        """False if the device was lost before."""
        is_news = self.state.mark_lost(device)
        if is_news:
            self.state.end_lost(device)
            self.wake()
        return is_news

    def wake(self) -> None:
        settle(self.state.pop_ended())

    def answer(self, ticket: Ticket) -> list[int]:
        return [int(embedding) for embedding in self.callers.outcome(ticket)]

    @property
    def waiting(self) -> tuple[int, int]:
        """The number of waiting images, and of their tokens."""
        return len(self.state.waiting), self.state.waiting_tokens

    def assert_empty(self) -> None:
        assert self.waiting == (0, 0)
        assert self.state.reserved_tokens == 0
        assert self.state.is_idle


class Batch:
    """A batch that a device has taken. The test ends it."""

    def __init__(self, queue: Queue, device: str, taken: TakenBatch) -> None:
        self.queue = queue
        self.device = device
        self.taken = taken

    @property
    def items(self) -> Sequence[EncodeItem]:
        return self.taken.items

    @property
    def values(self) -> list[int]:
        return [value_of(image) for image in self.items]

    @property
    def num_tokens(self) -> int:
        return sum(image.patches.num_tokens for image in self.items)

    def finish(self) -> None:
        """Ends the batch. Each embedding is the value of its image."""
        embeddings = tuple(torch.tensor([value]) for value in self.values)
        result = BatchResult(embeddings, (), self.queue.now, self.queue.now)
        self.queue.state.finish_batch(self.device, self.taken.number, result, self.queue.now)
        self.queue.wake()

    def fail(self, error: Exception) -> None:
        self.queue.state.fail_batch(self.device, self.taken.number, error, self.queue.now)
        self.queue.wake()


Make = Callable[..., Queue]


@pytest.fixture
def make(callers: Callers) -> Make:
    def make_queue(*devices: str, max_batch_tokens: int = 10, max_queue_tokens: int = 100) -> Queue:
        return Queue(
            callers,
            devices or ("a",),
            max_batch_tokens=max_batch_tokens,
            max_queue_tokens=max_queue_tokens,
        )

    return make_queue


def code_of(error: Exception) -> str:
    assert isinstance(error, ApiError), error
    return error.code


def test_images_are_taken_in_order_up_to_max_batch_tokens(make: Make) -> None:
    queue = make()
    tickets = [queue.put(item(4, 1), item(4, 2)), queue.put(item(4, 3)), queue.put(item(1, 4))]
    first, second = queue.take(), queue.take()
    # Images never overtake each other.
    assert [first.values, second.values] == [[1, 2], [3, 4]]
    second.finish()
    first.finish()
    assert [queue.answer(ticket) for ticket in tickets] == [[1, 2], [3], [4]]
    queue.assert_empty()


def test_image_larger_than_a_batch_runs_alone(make: Make) -> None:
    queue = make()
    queue.put(item(1, 1), item(25, 2), item(1, 3))
    assert [queue.take().values for _ in range(3)] == [[1], [2], [3]]


def test_request_may_be_split_over_batches(make: Make) -> None:
    queue = make()
    ticket = queue.put(*[item(6, value) for value in range(3)])
    batches = [queue.take() for _ in range(3)]
    for batch in reversed(batches):
        assert not ticket.ended
        batch.finish()
    assert queue.answer(ticket) == [0, 1, 2]


def test_waiting_images_and_tokens_are_counted(make: Make) -> None:
    queue = make("a", "b", max_queue_tokens=50)
    assert queue.state.limit_tokens == 100
    ticket = queue.callers.ticket()
    queue.state.reserve(ticket, 12)
    assert queue.waiting == (0, 0)
    queue.enqueue(ticket, [item(8), item(4)])
    assert queue.waiting == (2, 12)
    batch = queue.take()
    assert queue.waiting == (1, 4)
    assert not queue.state.is_idle
    rest = queue.take()
    assert not queue.state.is_idle
    batch.finish()
    rest.finish()
    queue.assert_empty()


@pytest.mark.parametrize(("num_idle_others", "share"), [(0, 6), (1, 3), (2, 2), (9, 1)])
def test_idle_devices_get_equal_shares(make: Make, num_idle_others: int, share: int) -> None:
    queue = make("a", "b", max_batch_tokens=100)
    ticket = queue.put(*[item(1, value) for value in range(6)])
    batch = queue.poll("a", num_idle_others)
    assert batch is not None
    assert batch.values == list(range(share))
    batch.finish()
    for rest in iter(partial(queue.poll, "b"), None):
        rest.finish()
    assert queue.answer(ticket) == list(range(6))


def test_request_reserves_all_of_its_tokens_or_none(make: Make) -> None:
    queue = make(max_queue_tokens=20)
    queue.put(item(8), item(7))
    with pytest.raises(TooManyRequests) as caught:
        queue.put(item(3), item(3))
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    assert queue.state.reserved_tokens == 15
    queue.put(item(5))
    with pytest.raises(TooManyRequests):
        queue.state.check_room()
    queue.take()  # taken images no longer count
    queue.state.check_room()
    queue.put(item(8))


def test_reserved_tokens_count_before_the_images_are_queued(make: Make) -> None:
    queue = make(max_queue_tokens=20)
    ticket = queue.callers.ticket()
    queue.state.reserve(ticket, 20)
    with pytest.raises(TooManyRequests):
        queue.state.check_room()
    queue.cancel(ticket)
    queue.state.check_room()
    queue.enqueue(ticket, [item(20)])
    queue.assert_empty()


def test_more_tokens_than_the_limit_are_too_large(make: Make) -> None:
    queue = make("a", "b", max_queue_tokens=20)
    queue.put(item(39))
    with pytest.raises(TooLarge) as caught:
        queue.put(item(41))
    assert (caught.value.status, caught.value.code) == (413, "too_many_tokens")
    assert "41 tokens" in str(caught.value)
    assert "40" in str(caught.value)


def test_ended_request_reserves_nothing(make: Make) -> None:
    queue = make()
    ticket = queue.callers.ticket()
    queue.cancel(ticket)
    queue.state.reserve(ticket, 5)
    queue.enqueue(ticket, [item(5)])
    queue.assert_empty()


@pytest.mark.parametrize(
    ("tokens_per_s", "seconds"), [(0.0, 1), (1e9, 1), (50.0, 2), (30.0, 4), (10.0, 10), (0.1, 10)]
)
def test_retry_after_is_the_time_to_encode_the_queue(make: Make, tokens_per_s: float, seconds: int) -> None:
    queue = make(max_queue_tokens=100)
    queue.state.devices["a"].tokens_per_s = tokens_per_s
    queue.put(item(100))
    with pytest.raises(TooManyRequests) as caught:
        queue.put(item(1))
    assert caught.value.headers() == {"Retry-After": str(seconds)}


def test_lost_device_does_not_count_towards_retry_after(make: Make) -> None:
    queue = make("a", "b", max_queue_tokens=100)
    for name, tokens_per_s in (("a", 1000.0), ("b", 50.0)):
        queue.state.devices[name].tokens_per_s = tokens_per_s
    queue.put(item(200))
    queue.lose("a")
    with pytest.raises(TooManyRequests) as caught:
        queue.put(item(1))
    assert caught.value.retry_after_s == 4


def test_retry_after_follows_from_the_measured_rate(make: Make) -> None:
    queue = make(max_queue_tokens=1000, max_batch_tokens=50)
    queue.put(item(50))
    batch = queue.take()
    queue.now += 0.25
    batch.finish()
    assert queue.state.devices["a"].tokens_per_s == pytest.approx(200)
    queue.put(item(500), item(500))
    with pytest.raises(TooManyRequests) as caught:
        queue.state.check_room()
    assert caught.value.retry_after_s == 5


def test_cancelled_request_is_skipped_and_releases_its_tokens(make: Make) -> None:
    queue = make()
    leaving, staying = queue.put(item(4, 1), item(4, 2)), queue.put(item(4, 3))
    queue.cancel(leaving)
    assert (len(queue.state.waiting), queue.state.reserved_tokens) == (1, 4)
    batch = queue.take()
    assert batch.values == [3]
    batch.finish()
    assert queue.answer(staying) == [3]
    assert isinstance(queue.callers.error(leaving), Abandoned)
    queue.assert_empty()


def test_cancelling_a_running_request_does_not_affect_its_neighbours(make: Make) -> None:
    queue = make()
    leaving, staying = queue.put(item(1, 1), item(20, 2)), queue.put(item(1, 3))
    batch = queue.take()
    queue.cancel(leaving)
    assert len(queue.state.waiting) == 1
    batch.finish()
    last = queue.take()
    assert last.values == [3]
    last.finish()
    assert queue.answer(staying) == [3]
    queue.assert_empty()


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_cancelled_request_gets_no_embeddings_from_a_running_batch_and_others_do(
    order: tuple[int, int], make: Make
) -> None:
    queue = make()
    tickets = {value: queue.put(item(1, value)) for value in order}
    batch = queue.take()
    queue.cancel(tickets[1])
    batch.finish()
    assert queue.answer(tickets[2]) == [2]
    assert isinstance(queue.callers.error(tickets[1]), Abandoned)
    queue.assert_empty()


def test_request_ends_once(make: Make) -> None:
    queue = make()
    ticket = queue.put(item(1, 5))
    batch = queue.take()
    batch.finish()
    queue.end(ticket, DeadlineExceeded())
    queue.cancel(ticket)
    assert queue.answer(ticket) == [5]
    failed = queue.put(item(1))
    queue.end(failed, DeadlineExceeded())
    queue.cancel(failed)
    assert code_of(queue.callers.error(failed)) == "deadline_exceeded"


def test_deadlines_are_checked_when_images_are_taken(make: Make) -> None:
    queue = make()
    now = queue.now
    late = [queue.put(item(1), item(1), deadline=now), queue.put(item(1), deadline=now - 1)]
    in_time = queue.put(item(1, 9), deadline=now + 60)
    batch = queue.take()
    assert batch.values == [9]
    batch.finish()
    assert {code_of(queue.callers.error(ticket)) for ticket in late} == {"deadline_exceeded"}
    assert queue.answer(in_time) == [9]
    queue.assert_empty()


def test_images_of_a_failed_batch_run_again_alone_and_first(make: Make) -> None:
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


def test_image_that_fails_alone_does_not_run_again(make: Make) -> None:
    queue = make()
    ticket = queue.put(item(2, 1))
    queue.take().fail(RuntimeError("odd shape"))
    assert code_of(queue.callers.error(ticket)) == "internal_error"
    queue.assert_empty()


def test_cancelled_request_does_not_run_again(make: Make) -> None:
    queue = make()
    leaving, staying = queue.put(item(2, 1)), queue.put(item(2, 2))
    batch = queue.take()
    queue.cancel(leaving)
    batch.fail(RuntimeError("odd shape"))
    assert len(queue.state.waiting) == 1
    queue.take().finish()
    assert queue.answer(staying) == [2]
    queue.assert_empty()


def test_request_cancelled_before_its_retry_is_skipped(make: Make) -> None:
    queue = make()
    leaving = queue.put(item(2, 1), item(2, 2))
    queue.take().fail(RuntimeError("odd shape"))
    assert queue.waiting == (2, 4)
    assert queue.state.reserved_tokens == 0
    queue.cancel(leaving)
    queue.assert_empty()


def test_lost_device_ends_only_its_own_requests(make: Make) -> None:
    queue = make("a", "b")
    lost, kept = queue.put(item(10, 1), item(10, 2)), queue.put(item(10, 3))
    dying, working = queue.take("a"), queue.take("b")
    assert [dying.values, working.values] == [[1], [2]]
    queue.lose("a")
    assert code_of(queue.callers.error(lost)) == "device_failed"
    assert queue.state.devices["a"].is_lost
    working.finish()
    assert not queue.state.is_serving("a")
    last = queue.take("b")
    assert last.values == [3]
    last.finish()
    assert queue.answer(kept) == [3]
    queue.assert_empty()


def test_all_waiting_requests_end_with_the_last_device(make: Make) -> None:
    queue = make("a", "b")
    tickets = [queue.put(item(10)) for _ in range(4)]
    prepared = queue.callers.ticket()
    queue.state.reserve(prepared, 10)
    for name in ("a", "b"):
        queue.take(name)
        queue.lose(name)
    queue.enqueue(prepared, [item(10)])
    errors = [queue.callers.error(ticket) for ticket in (*tickets, prepared)]
    assert {code_of(error) for error in errors} == {"device_failed"}
    with pytest.raises(Unavailable):
        queue.put(item(1))
    queue.assert_empty()


def test_device_that_has_work_and_finishes_none_is_stuck(make: Make) -> None:
    queue = make("a", "b")
    queue.put(item(10), item(10))
    batch = queue.take("a")
    queue.now += 0.02
    assert queue.state.stuck_devices(0.01, queue.now) == ["a"]
    assert queue.state.stuck_devices(60.0, queue.now) == []
    other = queue.take("a")
    assert queue.state.stuck_devices(0.01, queue.now) == ["a"]  # taking more work is not progress
    batch.finish()
    assert queue.state.stuck_devices(0.01, queue.now) == []
    other.finish()
    queue.now += 0.02
    assert queue.state.stuck_devices(0.01, queue.now) == []


@pytest.mark.parametrize("end", [Batch.finish, lambda batch: batch.fail(RuntimeError("late"))])
def test_result_of_a_lost_device_is_ignored(
    make: Make, end: Callable[[Batch], None], caplog: pytest.LogCaptureFixture
) -> None:
    queue = make()
    ticket = queue.put(item(1), item(1))
    batch = queue.take()
    queue.lose("a")
    assert code_of(queue.callers.error(ticket)) == "device_failed"
    end(batch)
    assert caplog.records == []
    queue.assert_empty()


class History(RuleBasedStateMachine):
    """Requests and devices act in any order. `check` knows the outcome that each request must have."""

    def __init__(self, num_devices: int) -> None:
        super().__init__()
        self.callers = Callers()
        self.devices = [f"d{index}" for index in range(num_devices)]
        self.queue = Queue(self.callers, self.devices, max_batch_tokens=10, max_queue_tokens=40)
        self.batches: list[Batch] = []
        self.reserved: list[tuple[Ticket, list[EncodeItem]]] = []
        self.queued: list[tuple[Ticket, list[EncodeItem]]] = []
        self.poisoned: set[int] = set()  # the values of images that fail whenever they run
        self.next_value = 0
        self.last_started = -1  # the highest value that a device took for the first time

    @property
    def alive(self) -> list[str]:
        return [name for name in self.devices if not self.queue.state.devices[name].is_lost]

    def images(self, sizes: list[int]) -> list[EncodeItem]:
        self.next_value += len(sizes)
        first = self.next_value - len(sizes)
        return [item(size, (first + i) % 251) for i, size in enumerate(sizes)]

    @precondition(lambda self: self.alive)
    @rule(sizes=st.lists(st.integers(1, 15), min_size=1, max_size=4), poison=st.booleans(), data=st.data())
    def reserve(self, sizes: list[int], poison: bool, data: st.DataObject) -> None:
        state = self.queue.state
        ticket, images = self.callers.ticket(), self.images(sizes)
        room = state.limit_tokens - state.reserved_tokens
        if sum(sizes) > state.limit_tokens:
            with pytest.raises(TooLarge):
                state.reserve(ticket, sum(sizes))
        elif sum(sizes) > room:
            with pytest.raises(TooManyRequests) as caught:
                state.reserve(ticket, sum(sizes))
            assert 1 <= (caught.value.retry_after_s or 0) <= 10
        else:
            state.reserve(ticket, sum(sizes))
            self.reserved.append((ticket, images))
            if poison:
                self.poisoned.add(value_of(data.draw(st.sampled_from(images))))

    @precondition(lambda self: self.reserved)
    @rule()
    def put(self) -> None:
        ticket, images = self.reserved.pop(0)
        self.queue.enqueue(ticket, images)
        self.queued.append((ticket, images))

    @precondition(lambda self: self.reserved or self.queued)
    @rule(data=st.data(), late=st.booleans())
    def end_early(self, data: st.DataObject, late: bool) -> None:
        ticket, _ = data.draw(st.sampled_from(self.reserved + self.queued))
        if late:
            self.queue.end(ticket, DeadlineExceeded())
        else:
            self.queue.cancel(ticket)

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
    @rule(data=st.data(), is_one_cancelled=st.booleans())
    def poll_all_devices(self, data: st.DataObject, is_one_cancelled: bool) -> None:
        wanting = []
        for name in data.draw(st.permutations(self.alive)):
            if self.queue.state.due_in_s(self.queue.now) == 0:
                wanting.append(name)
        if is_one_cancelled and self.queued:
            self.queue.cancel(data.draw(st.sampled_from(self.queued))[0])
        for name in wanting:
            batch = self.queue.poll(name)
            if batch is not None:
                assert batch.num_tokens <= 10 or len(batch.items) == 1
                self.batches.append(batch)

    def waiting_tickets(self) -> set[Ticket]:
        return {image.ticket for image in self.queue.state.waiting}

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
        self.queue.lose(name)

    @invariant()
    def reserved_tokens_are_those_of_requests_that_no_device_has_taken(self) -> None:
        state = self.queue.state
        assert 0 <= state.reserved_tokens <= state.limit_tokens
        assert state.waiting_tokens == sum(image.num_tokens for image in state.waiting)
        tickets = [ticket for ticket, _ in self.reserved + self.queued]
        assert state.reserved_tokens == sum(t.reserved_tokens for t in tickets if not t.ended)

    def teardown(self) -> None:
        """Ends all requests. Each has one outcome, and then nothing waits, runs or is reserved."""
        try:
            while self.reserved:
                self.put()
            while self.batches:
                self.run(self.batches.pop())
            while self.alive and any(ticket.deadline > 0 for ticket in self.waiting_tickets()):
                self.run(self.queue.take(self.alive[0]))
            for ticket, _ in self.queued:
                if not ticket.ended:  # its deadline has passed, and no device has looked at it since
                    assert ticket.deadline == 0
                    self.queue.end(ticket, DeadlineExceeded())
            self.queue.assert_empty()
            assert self.queue.state._requests == {}
            for ticket, images in self.queued:
                self.check(ticket, [value_of(image) for image in images])
        finally:
            self.callers.close()

    def check(self, ticket: Ticket, values: list[int]) -> None:
        try:
            assert self.queue.answer(ticket) == values
            assert not self.poisoned & set(values)
        except InternalError as error:
            index = int((error.param or "").removeprefix("images[").removesuffix("]"))
            assert values[index] in self.poisoned
        except Unavailable:
            assert len(self.alive) < len(self.devices)
        except (Abandoned, DeadlineExceeded):
            pass


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_every_request_ends_exactly_once_in_random_histories(num_devices: int) -> None:
    run_state_machine_as_test(
        partial(History, num_devices),  # type: ignore[arg-type]  # any callable will do
        settings=hypothesis_settings(
            derandomize=True, max_examples=60, stateful_step_count=40, deadline=None
        ),
    )

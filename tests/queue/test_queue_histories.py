"""Random histories of the queue."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from models import EncodeItem
from service.errors import (
    DeadlineExceeded,
    InternalError,
    TooLarge,
    TooManyRequests,
    Unavailable,
)
from service.queue.ticket import Abandoned, Ticket
from tests.support.queue_state import Batch, QueueByHand
from tests.support.queueing import Callers, item, value_of


class History(RuleBasedStateMachine):
    """Requests and devices act in any order. `check` knows the outcome that each request must have."""

    def __init__(self, num_devices: int) -> None:
        super().__init__()
        self.callers = Callers()
        self.devices = [f"d{index}" for index in range(num_devices)]
        self.queue = QueueByHand(self.callers, self.devices, max_batch_tokens=10, max_queue_tokens=40)
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

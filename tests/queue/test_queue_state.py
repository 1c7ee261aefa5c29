"""What the queue takes, reserves and refuses."""

from __future__ import annotations

from functools import partial

import pytest

from service.errors import (
    TooLarge,
    TooManyRequests,
)
from tests.support.queue_state import MakeState
from tests.support.queueing import item


def test_images_are_taken_in_order_up_to_max_batch_tokens(make_state: MakeState) -> None:
    queue = make_state()
    tickets = [queue.put(item(4, 1), item(4, 2)), queue.put(item(4, 3)), queue.put(item(1, 4))]
    first, second = queue.take(), queue.take()
    # Images never overtake each other.
    assert [first.values, second.values] == [[1, 2], [3, 4]]
    second.finish()
    first.finish()
    assert [queue.answer(ticket) for ticket in tickets] == [[1, 2], [3], [4]]
    queue.assert_empty()


def test_image_larger_than_a_batch_runs_alone(make_state: MakeState) -> None:
    queue = make_state()
    queue.put(item(1, 1), item(25, 2), item(1, 3))
    assert [queue.take().values for _ in range(3)] == [[1], [2], [3]]


def test_request_may_be_split_over_batches(make_state: MakeState) -> None:
    queue = make_state()
    ticket = queue.put(*[item(6, value) for value in range(3)])
    batches = [queue.take() for _ in range(3)]
    for batch in reversed(batches):
        assert not ticket.ended
        batch.finish()
    assert queue.answer(ticket) == [0, 1, 2]


def test_waiting_images_and_tokens_are_counted(make_state: MakeState) -> None:
    queue = make_state("a", "b", max_queue_tokens=50)
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
def test_idle_devices_get_equal_shares(make_state: MakeState, num_idle_others: int, share: int) -> None:
    queue = make_state("a", "b", max_batch_tokens=100)
    ticket = queue.put(*[item(1, value) for value in range(6)])
    batch = queue.poll("a", num_idle_others)
    assert batch is not None
    assert batch.values == list(range(share))
    batch.finish()
    for rest in iter(partial(queue.poll, "b"), None):
        rest.finish()
    assert queue.answer(ticket) == list(range(6))


def test_request_reserves_all_of_its_tokens_or_none(make_state: MakeState) -> None:
    queue = make_state(max_queue_tokens=20)
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


def test_reserved_tokens_count_before_the_images_are_queued(make_state: MakeState) -> None:
    queue = make_state(max_queue_tokens=20)
    ticket = queue.callers.ticket()
    queue.state.reserve(ticket, 20)
    with pytest.raises(TooManyRequests):
        queue.state.check_room()
    queue.cancel(ticket)
    queue.state.check_room()
    queue.enqueue(ticket, [item(20)])
    queue.assert_empty()


def test_more_tokens_than_the_limit_are_too_large(make_state: MakeState) -> None:
    queue = make_state("a", "b", max_queue_tokens=20)
    queue.put(item(39))
    with pytest.raises(TooLarge) as caught:
        queue.put(item(41))
    assert (caught.value.status, caught.value.code) == (413, "too_many_tokens")
    assert "41 tokens" in str(caught.value)
    assert "40" in str(caught.value)


def test_ended_request_reserves_nothing(make_state: MakeState) -> None:
    queue = make_state()
    ticket = queue.callers.ticket()
    queue.cancel(ticket)
    queue.state.reserve(ticket, 5)
    queue.enqueue(ticket, [item(5)])
    queue.assert_empty()


@pytest.mark.parametrize(
    ("tokens_per_s", "seconds"), [(0.0, 1), (1e9, 1), (50.0, 2), (30.0, 4), (10.0, 10), (0.1, 10)]
)
def test_retry_after_is_the_time_to_encode_the_queue(
    make_state: MakeState, tokens_per_s: float, seconds: int
) -> None:
    queue = make_state(max_queue_tokens=100)
    queue.state.devices["a"].tokens_per_s = tokens_per_s
    queue.put(item(100))
    with pytest.raises(TooManyRequests) as caught:
        queue.put(item(1))
    assert caught.value.headers() == {"Retry-After": str(seconds)}


def test_lost_device_does_not_count_towards_retry_after(make_state: MakeState) -> None:
    queue = make_state("a", "b", max_queue_tokens=100)
    for name, tokens_per_s in (("a", 1000.0), ("b", 50.0)):
        queue.state.devices[name].tokens_per_s = tokens_per_s
    queue.put(item(200))
    queue.lose("a")
    with pytest.raises(TooManyRequests) as caught:
        queue.put(item(1))
    assert caught.value.retry_after_s == 4


def test_retry_after_follows_from_the_measured_rate(make_state: MakeState) -> None:
    queue = make_state(max_queue_tokens=1000, max_batch_tokens=50)
    queue.put(item(50))
    batch = queue.take()
    queue.now += 0.25
    batch.finish()
    assert queue.state.devices["a"].tokens_per_s == pytest.approx(200)
    queue.put(item(500), item(500))
    with pytest.raises(TooManyRequests) as caught:
        queue.state.check_room()
    assert caught.value.retry_after_s == 5

"""How requests in the queue end: cancelled, failed, past their deadline, with a lost device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from service.errors import (
    ApiError,
    DeadlineExceeded,
    InternalError,
    Unavailable,
)
from service.queue.ticket import Abandoned
from tests.support.queue_state import Batch, MakeState
from tests.support.queueing import item


def code_of(error: Exception) -> str:
    assert isinstance(error, ApiError), error
    return error.code


def test_cancelled_request_is_skipped_and_releases_its_tokens(make_state: MakeState) -> None:
    queue = make_state()
    leaving, staying = queue.put(item(4, 1), item(4, 2)), queue.put(item(4, 3))
    queue.cancel(leaving)
    assert (len(queue.state.waiting), queue.state.reserved_tokens) == (1, 4)
    batch = queue.take()
    assert batch.values == [3]
    batch.finish()
    assert queue.answer(staying) == [3]
    assert isinstance(queue.callers.error(leaving), Abandoned)
    queue.assert_empty()


def test_cancelling_a_running_request_does_not_affect_its_neighbours(make_state: MakeState) -> None:
    queue = make_state()
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
    order: tuple[int, int], make_state: MakeState
) -> None:
    queue = make_state()
    tickets = {value: queue.put(item(1, value)) for value in order}
    batch = queue.take()
    queue.cancel(tickets[1])
    batch.finish()
    assert queue.answer(tickets[2]) == [2]
    assert isinstance(queue.callers.error(tickets[1]), Abandoned)
    queue.assert_empty()


def test_request_ends_once(make_state: MakeState) -> None:
    queue = make_state()
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


def test_deadlines_are_checked_when_images_are_taken(make_state: MakeState) -> None:
    queue = make_state()
    now = queue.now
    late = [queue.put(item(1), item(1), deadline=now), queue.put(item(1), deadline=now - 1)]
    in_time = queue.put(item(1, 9), deadline=now + 60)
    batch = queue.take()
    assert batch.values == [9]
    batch.finish()
    assert {code_of(queue.callers.error(ticket)) for ticket in late} == {"deadline_exceeded"}
    assert queue.answer(in_time) == [9]
    queue.assert_empty()


def test_images_of_a_failed_batch_run_again_alone_and_first(make_state: MakeState) -> None:
    queue = make_state()
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


def test_image_that_fails_alone_does_not_run_again(make_state: MakeState) -> None:
    queue = make_state()
    ticket = queue.put(item(2, 1))
    queue.take().fail(RuntimeError("odd shape"))
    assert code_of(queue.callers.error(ticket)) == "internal_error"
    queue.assert_empty()


def test_cancelled_request_does_not_run_again(make_state: MakeState) -> None:
    queue = make_state()
    leaving, staying = queue.put(item(2, 1)), queue.put(item(2, 2))
    batch = queue.take()
    queue.cancel(leaving)
    batch.fail(RuntimeError("odd shape"))
    assert len(queue.state.waiting) == 1
    queue.take().finish()
    assert queue.answer(staying) == [2]
    queue.assert_empty()


def test_request_cancelled_before_its_retry_is_skipped(make_state: MakeState) -> None:
    queue = make_state()
    leaving = queue.put(item(2, 1), item(2, 2))
    queue.take().fail(RuntimeError("odd shape"))
    assert queue.waiting == (2, 4)
    assert queue.state.reserved_tokens == 0
    queue.cancel(leaving)
    queue.assert_empty()


def test_lost_device_ends_only_its_own_requests(make_state: MakeState) -> None:
    queue = make_state("a", "b")
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


def test_all_waiting_requests_end_with_the_last_device(make_state: MakeState) -> None:
    queue = make_state("a", "b")
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


def test_device_that_has_work_and_finishes_none_is_stuck(make_state: MakeState) -> None:
    queue = make_state("a", "b")
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
    make_state: MakeState, end: Callable[[Batch], None], caplog: pytest.LogCaptureFixture
) -> None:
    queue = make_state()
    ticket = queue.put(item(1), item(1))
    batch = queue.take()
    queue.lose("a")
    assert code_of(queue.callers.error(ticket)) == "device_failed"
    end(batch)
    assert caplog.records == []
    queue.assert_empty()

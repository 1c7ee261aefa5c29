from __future__ import annotations

import asyncio
import threading
from itertools import pairwise

import pytest
import torch

from service.queue.ticket import Ticket, settle
from tests.support.queueing import Callers


def test_embeddings_are_in_the_order_of_the_images(callers: Callers) -> None:
    ticket = callers.ticket()
    ticket.queued(3, 1.0)
    assert [ticket.received(index, torch.tensor([index]), 2.0) for index in (2, 0, 1)] == [False, False, True]
    assert ticket.ended
    settle([ticket])
    assert [int(embedding) for embedding in callers.outcome(ticket)] == [0, 1, 2]


def test_error_ends_the_ticket_at_once(callers: Callers) -> None:
    ticket = callers.ticket()
    ticket.queued(2, 1.0)
    ticket.received(0, torch.tensor([0]), 2.0)
    ticket.failed(ValueError("odd"))
    settle([ticket])
    assert ticket.ended
    assert str(callers.error(ticket)) == "odd"


def test_stages_include_only_those_that_have_ended(callers: Callers) -> None:
    ticket = callers.ticket()
    assert ticket.stages_s(1.0) == {}
    ticket.queued(1, 1.5)
    assert ticket.stages_s(1.0) == {"decode": 0.5}
    ticket.taken(3.5)
    ticket.taken(5.0)  # again, after its batch failed
    assert ticket.stages_s(1.0) == {"decode": 0.5, "queue": 2.0}
    ticket.received(0, torch.tensor([0]), 7.5)
    assert ticket.stages_s(1.0) == {"decode": 0.5, "queue": 2.0, "encode": 4.0}


def test_ticket_may_be_settled_twice_and_after_its_coroutine_was_cancelled(
    callers: Callers, caplog: pytest.LogCaptureFixture
) -> None:
    cancelled, other = callers.ticket(), callers.ticket()

    async def cancel() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(cancelled.embeddings(), 0.001)

    callers.runner.run(cancel())
    for ticket in (cancelled, other):
        ticket.failed(ValueError("late"))
    settle([cancelled, other])
    settle([cancelled, other])
    assert str(callers.error(other)) == "late"
    callers.runner.run(asyncio.sleep(0))
    assert caplog.text == ""  # no callback failed


def test_tickets_of_several_loops_are_settled_from_any_thread() -> None:
    both, one = Callers(), Callers()
    tickets = [both.ticket(), one.ticket(), both.ticket()]
    for ticket in tickets:
        ticket.queued(1, 0.0)
        ticket.received(0, torch.tensor([7]), 1.0)
    thread = threading.Thread(target=settle, args=(tickets,))
    thread.start()
    for callers, ticket in zip((both, one, both), tickets, strict=True):
        assert [int(embedding) for embedding in callers.outcome(ticket)] == [7]
    thread.join()
    both.close()
    one.close()


def test_ticket_of_a_closed_loop_does_not_affect_other_tickets() -> None:
    callers, others = Callers(), Callers()
    orphaned, waiting = callers.ticket(), others.ticket()
    callers.close()
    for ticket in (orphaned, waiting):
        ticket.failed(ValueError("over"))
    settle([orphaned, waiting])
    assert str(others.error(waiting)) == "over"
    others.close()


def test_other_work_of_the_loop_runs_between_the_answers_of_a_large_batch(callers: Callers) -> None:
    async def count_turns() -> list[int]:
        tickets = [Ticket() for _ in range(20)]
        waiting = [asyncio.ensure_future(ticket.embeddings()) for ticket in tickets]
        await asyncio.sleep(0)
        for ticket in tickets:
            ticket.queued(1, 0.0)
            ticket.received(0, torch.tensor([0]), 1.0)
        settle(tickets)
        done = [0]
        while done[-1] < len(tickets):
            await asyncio.sleep(0)
            done.append(sum(task.done() for task in waiting))
        return done

    done = callers.runner.run(count_turns())
    steps = [after - before for before, after in pairwise(done)]
    assert max(steps) < 10

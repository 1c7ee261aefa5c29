"""Turns of API servers at one device, and API servers that exit."""

from __future__ import annotations

import threading

import pytest

from service.processes.device.dispatcher import Dispatcher, ServerLinks
from service.processes.wire.link import Link
from service.processes.wire.memory import SharedMemory
from service.processes.wire.messages import BatchImage, BatchMessage, Granted, Wanting
from tests.support.dispatching import MakeCompany, open_files
from tests.support.processes import DEVICE
from tests.support.queueing import POOLED, item, value_of
from tests.support.waiting import eventually

# Turns


def test_batches_of_api_servers_run_in_turn(make_dispatch: MakeCompany) -> None:
    company = make_dispatch(num_servers=3, max_batch_tokens=1)
    for number, server in enumerate(company.servers):
        server.put(*[item(1, number)] * 3)
    turns = []
    for left in (3, 3, 3, 3, 3, 3, 3, 2, 1):
        company.wait_until_wanting(left)
        [value] = company.take().values
        turns.append(value)
    assert sorted(turns[:3]) == [0, 1, 2]
    assert turns == turns[:3] * 3


def test_late_api_server_has_the_next_turn(make_dispatch: MakeCompany) -> None:
    company = make_dispatch(max_batch_tokens=1)
    busy, late = company.servers
    busy.put(*[item(1, 1)] * 4)
    company.wait_until_wanting(1)
    assert company.take().values == [1]
    company.wait_until_wanting(1)
    company.take()
    late.put(item(1, 2))
    company.wait_until_wanting(2)
    assert 2 in [company.take().values[0] for _ in range(2)]


def test_batch_is_formed_when_the_place_is_granted(make_dispatch: MakeCompany) -> None:
    company = make_dispatch(num_servers=1)
    [server] = company.servers
    server.put(item(1, 1))
    company.wait_until_wanting(1)
    server.put(item(1, 2))
    assert company.take().values == [1, 2]


def test_abandoned_images_take_no_place(make_dispatch: MakeCompany) -> None:
    company = make_dispatch()
    leaving, staying = company.servers
    gone = leaving.put(item(1, 1))
    company.wait_until_wanting(1)
    leaving.batcher.cancel(gone)
    staying.put(item(1, 2))
    company.wait_until_wanting(2)
    assert company.take().values == [2]
    back = leaving.put(item(1, 3))
    batch = company.take()
    assert batch.values == [3]
    batch.finish()
    assert [int(embedding) for embedding in leaving.outcome(back)] == [3]


# API servers that are gone


class Stranger:
    """An API server that the test plays."""

    def __init__(self) -> None:
        (batches, self.batches), (results, self.results) = Link.pair(), Link.pair()
        self.client = ServerLinks(batches, results)

    def was_granted(self) -> bool:
        self.batches.socket.setblocking(False)
        try:
            return self.batches.receive() == (Granted(0), [])
        except BlockingIOError:
            return False

    def leave(self) -> None:
        self.batches.close()
        self.results.close()


def test_api_server_that_exits_before_its_turn_is_skipped(make_dispatch: MakeCompany) -> None:
    stranger = Stranger()
    company = make_dispatch(num_servers=1, strangers=[stranger.client])
    stranger.batches.send(Wanting())
    stranger.leave()
    company.servers[0].put(item(1, 1))
    assert company.take().values == [1]


def test_api_server_that_exits_during_its_turn_is_skipped(make_dispatch: MakeCompany) -> None:
    stranger = Stranger()
    company = make_dispatch(num_servers=1, strangers=[stranger.client])

    def go() -> None:
        assert stranger.batches.receive() == (Granted(0), [])
        stranger.leave()

    stranger.batches.send(Wanting())
    going = threading.Thread(target=go)
    going.start()
    company.servers[0].put(item(1, 1))
    assert company.take().values == [1]
    going.join(10)


def two_that_want(make_dispatch: MakeCompany) -> tuple[Dispatcher, Stranger, Stranger]:
    """Both have been heard, and none has its turn yet."""
    first, second = Stranger(), Stranger()
    dispatcher = make_dispatch(num_servers=0, strangers=[first.client, second.client]).dispatcher
    for stranger in (first, second):
        stranger.batches.send(Wanting())
        dispatcher._listen(0.0)
    return dispatcher, first, second


def test_api_server_that_exits_frees_its_place(make_dispatch: MakeCompany) -> None:
    dispatcher, going, staying = two_that_want(make_dispatch)
    dispatcher._grant()
    assert going.was_granted()
    dispatcher._granted[going.client] += 3600.0  # so that no patience ends
    going.leave()
    dispatcher._listen(0.0)
    dispatcher._grant()
    assert staying.was_granted()
    staying.leave()


def test_api_server_that_exits_before_its_turn_takes_no_place(make_dispatch: MakeCompany) -> None:
    dispatcher, going, staying = two_that_want(make_dispatch)
    going.leave()
    dispatcher._listen(0.0)
    dispatcher._grant()
    assert staying.was_granted()
    staying.leave()


@pytest.mark.parametrize(("has_work", "patience_s"), [(False, 0.01), (True, 0.1)])
def test_idle_device_waits_less_for_a_granted_batch(
    make_dispatch: MakeCompany, has_work: bool, patience_s: float
) -> None:
    slow, other = Stranger(), Stranger()
    company = make_dispatch(num_servers=1, strangers=[slow.client, other.client])
    if has_work:
        company.servers[0].put(item(1, 1))
        batch = company.take()
    for stranger in (slow, other):
        stranger.batches.send(Wanting())
        company.dispatcher._listen(0.0)
    assert company.dispatcher._grant() == patience_s
    assert slow.was_granted()
    for stranger in (slow, other):
        stranger.leave()
    if has_work:
        batch.finish()


def test_result_for_an_api_server_that_has_exited_is_dropped(
    make_dispatch: MakeCompany, caplog: pytest.LogCaptureFixture
) -> None:
    company = make_dispatch()
    gone, staying = company.servers
    gone.put(item(1, 1))
    batch = company.take()
    gone.batcher.close()
    gone.replica.close()
    before = open_files()
    batch.finish()
    assert company.idleness.is_idle
    assert (company.lost, open_files(), caplog.records) == ([], before, [])
    ticket = staying.put(item(1, 2))
    company.take().finish()
    assert [int(embedding) for embedding in staying.outcome(ticket)] == [2]


def test_take_returns_none_once_all_api_servers_have_exited(make_dispatch: MakeCompany) -> None:
    company = make_dispatch()
    for server in company.servers:
        server.batcher.close()
        server.replica.close()
        server.serving.result(10)
    assert company.dispatcher.take() is None


def test_api_server_that_sends_no_batch_does_not_block_others(make_dispatch: MakeCompany) -> None:
    stranger = Stranger()
    company = make_dispatch(num_servers=1, strangers=[stranger.client])
    stranger.batches.send(Wanting())
    company.wait_until_wanting(1)
    [server] = company.servers
    tickets = [server.put(item(1, 1)), server.put(item(1, 2))]
    values: list[int] = []
    while len(values) < 2:
        batch = company.take()
        values += batch.values
        batch.finish()
    assert values == [1, 2]
    assert stranger.batches.receive() == (Granted(0), [])
    for ticket in tickets:
        server.outcome(ticket)
    stranger.leave()


def test_late_batch_runs_next(make_dispatch: MakeCompany) -> None:
    stranger = Stranger()
    stranger.client.memory = SharedMemory.create(2**10)
    company = make_dispatch(num_servers=1, strangers=[stranger.client])
    stranger.batches.send(Wanting())
    company.wait_until_wanting(1)
    [server] = company.servers
    ticket = server.put(item(1, 1))
    batch = company.take()
    stranger.client.memory.bytes.fill_(7)
    stranger.batches.send(BatchMessage(0, (BatchImage((1, 2, 2), 1, POOLED),), 4))
    assert company.take().values == [7]
    batch.finish()
    assert [int(embedding) for embedding in server.outcome(ticket)] == [1]
    stranger.leave()


@pytest.mark.parametrize("num_idle_others", [0, 1])
def test_work_is_shared_with_idle_devices(make_dispatch: MakeCompany, num_idle_others: int) -> None:
    company = make_dispatch(num_servers=1, max_batch_tokens=100)
    company.idleness.num_others = num_idle_others
    company.servers[0].put(*[item(1, value) for value in range(4)])
    assert len(company.take().values) == 4 // (1 + num_idle_others)


def test_busy_device_leaves_images_to_an_idle_device(make_dispatch: MakeCompany) -> None:
    company = make_dispatch(num_servers=1)
    [server] = company.servers
    server.put(item(1, 1))
    running = company.take()
    company.idleness.num_others = 1
    server.put(item(1, 2))
    taking = company.threads.submit(company.dispatcher.take)
    with pytest.raises(TimeoutError):
        taking.result(0.1)
    company.idleness.num_others = 0  # it is busy, too
    taken = taking.result(10)
    assert taken is not None
    assert [value_of(image) for image in taken[0]] == [2]
    running.finish()


def test_closing_while_images_wait_is_no_fault_of_the_device(make_dispatch: MakeCompany) -> None:
    company = make_dispatch(num_servers=1)
    [server] = company.servers
    server.put(item(1, 1))
    company.wait_until_wanting(1)
    server.batcher.close()
    server.replica.close()
    assert server.serving.result(10) is None
    assert server.lost == []


def test_closed_api_server_has_no_thread_left(make_dispatch: MakeCompany) -> None:
    company = make_dispatch(num_servers=1)
    [server] = company.servers
    names = {f"batches-{DEVICE}", f"results-{DEVICE}"}
    assert names <= {thread.name for thread in threading.enumerate()}
    server.batcher.close()
    server.replica.close()
    assert server.serving.result(10) is None
    eventually(lambda: not names & {thread.name for thread in threading.enumerate()})
    assert server.lost == []

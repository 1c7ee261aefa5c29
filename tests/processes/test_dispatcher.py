"""Batches on their way from the queues of API servers to a device, and their results on the way back."""

from __future__ import annotations

import gc
import os
import pickle
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from models import EncodeItem, OutputSpec
from service.errors import ApiError, InternalError, Unavailable
from service.processes.device.dispatcher import Dispatcher, ServerLinks, place
from service.processes.wire.link import MAX_FILES, Link
from service.processes.wire.link import _Large as Large
from service.processes.wire.memory import SharedMemory
from service.processes.wire.messages import BatchImage, BatchMessage, Granted, Place, Result, Wanting
from tests.support.app import known_embedding
from tests.support.processes import DEVICE, ApiServer, Company, CopyingEncoder
from tests.support.queueing import POOLED, Callers, item, value_of
from tests.support.waiting import eventually

MIB = 2**20
TOKENS = OutputSpec(pooled=False, deepstack=False)
DTYPES = (None, torch.float16, torch.bfloat16)
OUTPUTS = [
    *(
        OutputSpec(pooled=True, deepstack=False, dtype=dtype)
        for dtype in (None, torch.float16, torch.bfloat16)
    ),
    OutputSpec(pooled=True, normalize=True, deepstack=False),
    *(OutputSpec(deepstack=False, dtype=dtype) for dtype in DTYPES),
    OutputSpec(deepstack=True),
]

Make = Callable[..., Company]


@pytest.fixture
def make(callers: Callers) -> Iterator[Make]:
    made: list[Company] = []

    def make_company(**options: object) -> Company:
        made.append(Company(callers, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make_company
    for company in made:
        company.close()


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def shared_maps() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:")


def code_of(error: Exception) -> str:
    assert isinstance(error, ApiError), error
    return error.code


# Results


def test_results_of_every_kind_come_back_unchanged(make: Make) -> None:
    company = make(max_batch_tokens=1000)
    company.serve(CopyingEncoder())
    server = company.servers[0]
    images = [item(size, size, output) for size in (1, 3, 17) for output in OUTPUTS]
    found = server.outcome(server.put(*images))
    for image, embedding in zip(images, found, strict=True):
        expected = known_embedding(image.patches, image.output)
        assert (embedding.dtype, embedding.shape) == (expected.dtype, expected.shape)
        assert embedding.equal(expected)
    assert sum(stats.num_images for stats in server.observed) == len(images)
    assert {stats.device for stats in server.observed} == {DEVICE}
    assert company.servers[1].observed == []


def test_each_api_server_gets_its_own_results_under_load(make: Make) -> None:
    """The one memory for patches is written by all, and again before results are there."""
    company = make(num_servers=3, memory_bytes=16 * 20)
    company.serve(CopyingEncoder())
    rng = random.Random(2)
    sent = []
    for _ in range(150):
        server = rng.choice(company.servers)
        images = [item(rng.randint(1, 10), rng.randrange(256)) for _ in range(rng.randint(1, 4))]
        sent.append((server, images, server.put(*images)))
    for server, images, ticket in sent:
        assert [embedding[0].item() for embedding in server.outcome(ticket)] == [value_of(i) for i in images]
    eventually(lambda: company.idleness.is_idle)
    assert all(server.batcher.is_idle for server in company.servers)


@pytest.mark.parametrize(
    ("sizes", "files"),
    [
        ([], []),
        ([100, MIB - 1, 64], [0, 0, 0]),
        ([MIB - 1, MIB, MIB + 1, 5], [0, 1, 2, 0]),
        ([MIB] * (MAX_FILES + 2), [*range(1, MAX_FILES), 0, 0, 0]),
    ],
    ids=["none", "small", "border", "many"],
)
def test_large_embeddings_have_memory_of_their_own_while_files_are_left(
    sizes: Sequence[int], files: Sequence[int]
) -> None:
    tensors = [torch.empty(0, dtype=torch.uint8).expand(0) if not size else _bytes(size) for size in sizes]
    places, file_sizes = place(tensors)
    assert [there.file for there in places] == files
    assert len(file_sizes) <= MAX_FILES
    ends = [0] * len(file_sizes)
    for there, size in zip(places, sizes, strict=True):
        assert there.offset % 64 == 0
        assert there.offset >= ends[there.file]  # none overlaps another
        ends[there.file] = there.offset + size
    assert all(end <= size for end, size in zip(ends, file_sizes, strict=True))


def _bytes(size: int) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8).expand(size)


def test_large_answer_does_not_keep_the_memory_of_others(make: Make) -> None:
    company = make(num_servers=1)
    [server] = company.servers
    ticket = server.put(item(1, 1, TOKENS), item(1, 2, TOKENS), item(1, 3, TOKENS))
    opened, mapped = open_files(), shared_maps()
    company.take().finish(*(torch.full((MIB + extra,), 5, dtype=torch.uint8) for extra in (-1, 0, 1)))
    embeddings = list(server.outcome(ticket))
    assert [len(embedding) for embedding in embeddings] == [MIB - 1, MIB, MIB + 1]
    assert all(bool((embedding == 5).all()) for embedding in embeddings)
    assert len({embedding.untyped_storage().data_ptr() for embedding in embeddings}) == 3
    del ticket
    held = shared_maps()
    embeddings.pop()
    assert shared_maps() == held - 1
    embeddings.clear()
    assert shared_maps() == mapped
    assert open_files() == opened


def test_more_large_embeddings_than_files_in_a_message_are_sent(make: Make) -> None:
    company = make(num_servers=1, max_batch_tokens=1000)
    [server] = company.servers
    number = MAX_FILES + 3
    values = [value % 256 for value in range(number)]
    ticket = server.put(*[item(1, value, TOKENS) for value in values])
    opened = open_files()
    batch = company.take()
    batch.finish(*(torch.tensor(value, dtype=torch.uint8).expand(MIB) for value in batch.values))
    embeddings = server.outcome(ticket)
    assert [int(embedding[-1]) for embedding in embeddings] == values
    assert all(len(embedding) == MIB for embedding in embeddings)
    del embeddings, batch, ticket
    assert open_files() == opened


def test_batch_of_very_many_images_is_sent(make: Make) -> None:
    company = make(num_servers=1, max_batch_tokens=5000)
    [server] = company.servers
    values = [value % 256 for value in range(3000)]
    ticket = server.put(*[item(1, value) for value in values])
    company.take().finish()
    assert [int(embedding) for embedding in server.outcome(ticket)] == values


# Turns


def test_batches_of_api_servers_run_in_turn(make: Make) -> None:
    company = make(num_servers=3, max_batch_tokens=1)
    for number, server in enumerate(company.servers):
        server.put(*[item(1, number)] * 3)
    turns = []
    for left in (3, 3, 3, 3, 3, 3, 3, 2, 1):
        company.wait_until_wanting(left)
        [value] = company.take().values
        turns.append(value)
    assert sorted(turns[:3]) == [0, 1, 2]
    assert turns == turns[:3] * 3


def test_late_api_server_has_the_next_turn(make: Make) -> None:
    company = make(max_batch_tokens=1)
    busy, late = company.servers
    busy.put(*[item(1, 1)] * 4)
    company.wait_until_wanting(1)
    assert company.take().values == [1]
    company.wait_until_wanting(1)
    company.take()
    late.put(item(1, 2))
    company.wait_until_wanting(2)
    assert 2 in [company.take().values[0] for _ in range(2)]


def test_batch_is_formed_when_the_place_is_granted(make: Make) -> None:
    company = make(num_servers=1)
    [server] = company.servers
    server.put(item(1, 1))
    company.wait_until_wanting(1)
    server.put(item(1, 2))
    assert company.take().values == [1, 2]


def test_abandoned_images_take_no_place(make: Make) -> None:
    company = make()
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


def test_api_server_that_exits_before_its_turn_is_skipped(make: Make) -> None:
    stranger = Stranger()
    company = make(num_servers=1, strangers=[stranger.client])
    stranger.batches.send(Wanting())
    stranger.leave()
    company.servers[0].put(item(1, 1))
    assert company.take().values == [1]


def test_api_server_that_exits_during_its_turn_is_skipped(make: Make) -> None:
    stranger = Stranger()
    company = make(num_servers=1, strangers=[stranger.client])

    def go() -> None:
        assert stranger.batches.receive() == (Granted(0), [])
        stranger.leave()

    stranger.batches.send(Wanting())
    going = threading.Thread(target=go)
    going.start()
    company.servers[0].put(item(1, 1))
    assert company.take().values == [1]
    going.join(10)


def two_that_want(make: Make) -> tuple[Dispatcher, Stranger, Stranger]:
    """Both have been heard, and none has its turn yet."""
    first, second = Stranger(), Stranger()
    dispatcher = make(num_servers=0, strangers=[first.client, second.client]).dispatcher
    for stranger in (first, second):
        stranger.batches.send(Wanting())
        dispatcher._listen(0.0)
    return dispatcher, first, second


def test_api_server_that_exits_frees_its_place(make: Make) -> None:
    dispatcher, going, staying = two_that_want(make)
    dispatcher._grant()
    assert going.was_granted()
    dispatcher._granted[going.client] += 3600.0  # so that no patience ends
    going.leave()
    dispatcher._listen(0.0)
    dispatcher._grant()
    assert staying.was_granted()
    staying.leave()


def test_api_server_that_exits_before_its_turn_takes_no_place(make: Make) -> None:
    dispatcher, going, staying = two_that_want(make)
    going.leave()
    dispatcher._listen(0.0)
    dispatcher._grant()
    assert staying.was_granted()
    staying.leave()


@pytest.mark.parametrize(("has_work", "patience_s"), [(False, 0.01), (True, 0.1)])
def test_idle_device_waits_less_for_a_granted_batch(make: Make, has_work: bool, patience_s: float) -> None:
    slow, other = Stranger(), Stranger()
    company = make(num_servers=1, strangers=[slow.client, other.client])
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
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    company = make()
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


def test_take_returns_none_once_all_api_servers_have_exited(make: Make) -> None:
    company = make()
    for server in company.servers:
        server.batcher.close()
        server.replica.close()
        server.serving.result(10)
    assert company.dispatcher.take() is None


def test_api_server_that_sends_no_batch_does_not_block_others(make: Make) -> None:
    stranger = Stranger()
    company = make(num_servers=1, strangers=[stranger.client])
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


def test_late_batch_runs_next(make: Make) -> None:
    stranger = Stranger()
    stranger.client.memory = SharedMemory.create(2**10)
    company = make(num_servers=1, strangers=[stranger.client])
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
def test_work_is_shared_with_idle_devices(make: Make, num_idle_others: int) -> None:
    company = make(num_servers=1, max_batch_tokens=100)
    company.idleness.num_others = num_idle_others
    company.servers[0].put(*[item(1, value) for value in range(4)])
    assert len(company.take().values) == 4 // (1 + num_idle_others)


def test_busy_device_leaves_images_to_an_idle_device(make: Make) -> None:
    company = make(num_servers=1)
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


def test_closing_while_images_wait_is_no_fault_of_the_device(make: Make) -> None:
    company = make(num_servers=1)
    [server] = company.servers
    server.put(item(1, 1))
    company.wait_until_wanting(1)
    server.batcher.close()
    server.replica.close()
    assert server.serving.result(10) is None
    assert server.lost == []


def test_closed_api_server_has_no_thread_left(make: Make) -> None:
    company = make(num_servers=1)
    [server] = company.servers
    names = {f"batches-{DEVICE}", f"results-{DEVICE}"}
    assert names <= {thread.name for thread in threading.enumerate()}
    server.batcher.close()
    server.replica.close()
    assert server.serving.result(10) is None
    eventually(lambda: not names & {thread.name for thread in threading.enumerate()})
    assert server.lost == []


# Failures


def failing_on(value: int, error: Exception) -> CopyingEncoder:
    def fail_on_some(items: Sequence[EncodeItem]) -> None:
        if any(value_of(image) == value for image in items):
            raise error

    return CopyingEncoder(fail_on_some)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("cannot encode it"), "cannot encode it"),
        (torch.OutOfMemoryError("out of memory"), "out of memory"),
        (KeyError(), "KeyError()"),
    ],
)
def test_image_that_fails_fails_alone_with_its_reason(make: Make, error: Exception, message: str) -> None:
    company = make()
    company.serve(failing_on(7, error))
    server, other = company.servers
    bad, good = server.put(item(1, 1), item(1, 7)), server.put(item(1, 2))
    elsewhere = other.put(item(1, 3))
    failure = server.error(bad)
    assert isinstance(failure, InternalError)
    assert failure.param == "images[1]"
    cause = failure.__cause__
    assert isinstance(cause, RuntimeError)
    assert str(cause) == message
    [trace] = cause.__notes__
    assert "in fail_on_some" in trace
    assert type(error).__name__ in trace
    assert server.outcome(good)[0][0] == 2
    assert other.outcome(elsewhere)[0][0] == 3
    assert (company.lost, server.lost, other.lost) == ([], [], [])


def test_device_that_fails_is_lost_to_its_callers_and_reported_to_the_supervisor(make: Make) -> None:
    company = make()
    company.serve(failing_on(7, torch.AcceleratorError("illegal memory access")))
    server, other = company.servers
    failure = server.error(server.put(item(1, 7)))
    assert code_of(failure) == "device_failed"
    eventually(lambda: len(company.lost) == 1)
    for [error] in (company.lost, server.lost):
        assert error.device == DEVICE
        assert str(error) == f"device {DEVICE} is lost: illegal memory access"
    assert other.lost == []  # it is told by the supervisor
    with pytest.raises(Unavailable):
        server.put(item(1, 1))


@pytest.mark.parametrize("num_waiting", [0, 1])
def test_all_requests_are_answered_when_the_process_of_the_device_exits(make: Make, num_waiting: int) -> None:
    company = make(max_batch_tokens=1)
    server, other = company.servers
    tickets = [server.put(item(1, value)) for value in range(2 + num_waiting)]
    company.take()
    company.take()
    company.end_device()
    assert {code_of(server.error(ticket)) for ticket in tickets} == {"device_failed"}
    assert code_of(other.error(other.put(item(1, 4)))) == "device_failed"
    assert (len(server.lost), len(other.lost)) == (1, 1)
    for one in (server, other):
        eventually(one.serving.done)
        assert one.batcher.is_idle


def test_device_that_finishes_no_work_is_stuck(make: Make) -> None:
    company = make(num_servers=1, max_batch_tokens=1)
    [server] = company.servers
    dispatcher = company.dispatcher
    assert company.idleness.is_idle
    assert not dispatcher.is_stuck(0.0)
    server.put(item(1, 1), item(1, 2))
    first = company.take()
    time.sleep(0.1)
    second = company.take()
    assert dispatcher.is_stuck(0.05)  # more work is no progress
    assert not dispatcher.is_stuck(60.0)
    first.finish()
    assert not dispatcher.is_stuck(0.05)  # it got on
    assert not company.idleness.is_idle
    time.sleep(0.1)
    assert dispatcher.is_stuck(0.05)
    second.finish()
    assert company.idleness.is_idle
    time.sleep(0.1)
    assert not dispatcher.is_stuck(0.05)
    server.put(item(1, 3))
    last = company.take()
    assert not dispatcher.is_stuck(0.05)  # that it was idle for long is no fault
    last.finish()


def test_patches_that_do_not_fit_into_the_memory_fail_their_image(make: Make) -> None:
    company = make(memory_bytes=5 * 16, max_batch_tokens=100)  # of five tokens
    company.serve(CopyingEncoder())
    server = company.servers[0]
    too_large, fits = server.put(item(6, 1)), server.put(item(5, 2), item(4, 3))
    assert isinstance(server.error(too_large), InternalError)
    assert [embedding[0].item() for embedding in server.outcome(fits)] == [2, 3]
    eventually(lambda: server.batcher.is_idle)
    assert server.lost == []


def embedding_that_cannot_be_copied() -> torch.Tensor:
    return torch.empty(3, device="meta")


def test_result_that_cannot_be_sent_fails_its_batch(make: Make) -> None:
    company = make(num_servers=1)
    [server] = company.servers
    ticket = server.put(item(1, 1))
    before = open_files()
    company.take().finish(embedding_that_cannot_be_copied())
    assert isinstance(server.error(ticket), InternalError)
    assert open_files() == before
    _still_serves(company, server)


def test_result_that_cannot_be_read_fails_its_batch(make: Make) -> None:
    """As where a process has so many files open that those of the message are dropped."""
    company = make(num_servers=1)
    [server], [device] = company.servers, company.clients
    ticket = server.put(item(1, 1))
    assert device.batches.receive()[0] == Wanting()
    device.batches.send(Granted(0))
    batch, _ = device.batches.receive()
    somewhere = Place(0, 0, (1,), torch.float32)
    with tempfile.TemporaryFile() as file:
        before = open_files()
        too_few = [file.fileno()]
        device.results.send(Result(batch.number, (64, 64), (somewhere,), (), 1.0, 2.0), too_few)
        assert isinstance(server.error(ticket), InternalError)
        assert open_files() == before
    _still_serves(company, server)


def test_message_that_cannot_be_read_loses_the_device(make: Make) -> None:
    """As where the memory of a large one was dropped. Nobody knows whose result it was."""
    company = make(num_servers=1, max_batch_tokens=1)
    [server] = company.servers
    tickets = [server.put(item(1, 1)), server.put(item(1, 2))]
    company.take()
    company.clients[0].results.socket.send(pickle.dumps(Large(2**20)))
    assert [code_of(server.error(ticket)) for ticket in tickets] == ["device_failed"] * 2
    [error] = server.lost
    assert isinstance(error.__cause__, OSError)


def _still_serves(company: Company, server: ApiServer) -> None:
    ticket = server.put(item(1, 9))
    company.take().finish()
    assert [int(embedding) for embedding in server.outcome(ticket)] == [9]
    assert (company.lost, server.lost) == ([], [])

"""Batches, devices and messages that fail between processes."""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Sequence

import pytest
import torch

from models import EncodeItem
from service.errors import ApiError, InternalError, Unavailable
from service.processes.wire.link import _Large as Large
from service.processes.wire.messages import Granted, Place, Result, Wanting
from tests.support.dispatching import MakeCompany, open_files
from tests.support.processes import DEVICE, ApiServer, Company, CopyingEncoder
from tests.support.queueing import item, value_of
from tests.support.waiting import eventually


def code_of(error: Exception) -> str:
    assert isinstance(error, ApiError), error
    return error.code


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
def test_image_that_fails_fails_alone_with_its_reason(
    make_dispatch: MakeCompany, error: Exception, message: str
) -> None:
    company = make_dispatch()
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


def test_device_that_fails_is_lost_to_its_callers_and_reported_to_the_supervisor(
    make_dispatch: MakeCompany,
) -> None:
    company = make_dispatch()
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
def test_all_requests_are_answered_when_the_process_of_the_device_exits(
    make_dispatch: MakeCompany, num_waiting: int
) -> None:
    company = make_dispatch(max_batch_tokens=1)
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


def test_device_that_finishes_no_work_is_stuck(make_dispatch: MakeCompany) -> None:
    company = make_dispatch(num_servers=1, max_batch_tokens=1)
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


def test_patches_that_do_not_fit_into_the_memory_fail_their_image(make_dispatch: MakeCompany) -> None:
    company = make_dispatch(memory_bytes=5 * 16, max_batch_tokens=100)  # of five tokens
    company.serve(CopyingEncoder())
    server = company.servers[0]
    too_large, fits = server.put(item(6, 1)), server.put(item(5, 2), item(4, 3))
    assert isinstance(server.error(too_large), InternalError)
    assert [embedding[0].item() for embedding in server.outcome(fits)] == [2, 3]
    eventually(lambda: server.batcher.is_idle)
    assert server.lost == []


def embedding_that_cannot_be_copied() -> torch.Tensor:
    return torch.empty(3, device="meta")


def test_result_that_cannot_be_sent_fails_its_batch(make_dispatch: MakeCompany) -> None:
    company = make_dispatch(num_servers=1)
    [server] = company.servers
    ticket = server.put(item(1, 1))
    before = open_files()
    company.take().finish(embedding_that_cannot_be_copied())
    assert isinstance(server.error(ticket), InternalError)
    assert open_files() == before
    _still_serves(company, server)


def test_result_that_cannot_be_read_fails_its_batch(make_dispatch: MakeCompany) -> None:
    """As where a process has so many files open that those of the message are dropped."""
    company = make_dispatch(num_servers=1)
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


def test_message_that_cannot_be_read_loses_the_device(make_dispatch: MakeCompany) -> None:
    """As where the memory of a large one was dropped. Nobody knows whose result it was."""
    company = make_dispatch(num_servers=1, max_batch_tokens=1)
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

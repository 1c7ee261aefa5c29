"""Devices that fail, hang or lose a thread."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import torch

from models import DeviceError, EncodeItem, OutputSpec, Preprocessor
from service.engine.engine import State
from service.queue.batcher import Batcher
from service.queue.queue_records import QueueLimits
from service.queue.ticket import Ticket
from tests.support.app import CONFIG, FakeEncoder
from tests.support.faults import (
    FailingAtLaunch,
    Held,
    InBackground,
    Serve,
    check_answered,
    complaints,
    requests,
    slowly,
)
from tests.support.serving import HeldUpload, Served, call_all
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("log")


def kill(thread_name: str) -> None:
    """Raises `SystemExit` in a thread as soon as it runs Python code."""
    # The newest thread of this name: older ones belong to lost devices and may never end.
    ident = [thread.ident for thread in threading.enumerate() if thread.name == thread_name][-1]
    assert ident is not None
    pending = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))
    assert pending == 1


@pytest.mark.parametrize("num_devices", [1, 2])
def test_device_error_fails_only_the_requests_of_that_device(
    serve_faulty: Serve, num_devices: int, gate: threading.Event, log: pytest.LogCaptureFixture
) -> None:
    lost, healthy = Held(gate, torch.AcceleratorError("illegal memory access")), Held(gate)
    served = serve_faulty(*[FakeEncoder(lost), FakeEncoder(healthy)][:num_devices])
    callers = InBackground(served.port, requests(60))
    upload = HeldUpload(served.port)
    served.wait_until_in_flight(61)
    eventually(lost.is_at_work.is_set)
    gate.set()
    check_lost(served, callers, upload, num_devices, log)
    assert "illegal memory access" in complaints(log)[0]


@pytest.mark.parametrize("num_devices", [1, 2])
def test_stuck_device_is_lost(
    serve_faulty: Serve, num_devices: int, gate: threading.Event, log: pytest.LogCaptureFixture
) -> None:
    encoders = [FakeEncoder(Held(gate)), FakeEncoder(slowly)][:num_devices]
    served = serve_faulty(*encoders, device_timeout_s=0.5)
    upload = HeldUpload(served.port)
    served.wait_until_in_flight(1)
    callers = InBackground(served.port, requests(60))
    check_lost(served, callers, upload, num_devices, log)
    assert "finished nothing for 0.5 s" in complaints(log)[0]


@pytest.mark.parametrize("num_devices", [1, 2])
def test_device_is_lost_if_its_launching_thread_dies(
    serve_faulty: Serve, num_devices: int, log: pytest.LogCaptureFixture
) -> None:
    served = serve_faulty(*(FakeEncoder(slowly) for _ in range(num_devices)))
    first = requests(10)
    check_answered(asyncio.run(call_all(served.port, first)), first)
    eventually(lambda: served.engine.is_idle)
    upload = HeldUpload(served.port)
    served.wait_until_in_flight(1)
    kill("replica-fake_0" if num_devices == 1 else "replica-fake:0_0")  # it waits for a batch
    callers = InBackground(served.port, requests(30))
    check_lost(served, callers, upload, num_devices, log, num_before=10)
    assert "SystemExit" in complaints(log)[0]


def test_device_is_stuck_if_its_finishing_thread_dies(
    serve_faulty: Serve, log: pytest.LogCaptureFixture
) -> None:
    served = serve_faulty(FakeEncoder(slowly), device_timeout_s=0.5)
    [first] = asyncio.run(call_all(served.port, [[9]]))
    assert first.status == 200
    eventually(lambda: served.engine.is_idle)
    upload = HeldUpload(served.port)
    served.wait_until_in_flight(1)
    kill("results-fake_0")
    callers = InBackground(served.port, requests(20))
    # `concurrent.futures` logs the end of the thread, too.
    check_lost(served, callers, upload, 1, log, num_before=1, num_lines=2)
    assert "finished nothing" in complaints(log)[1]
    served.replicas[0]._places.release()  # else the launching thread never ends, nor do the tests


@pytest.mark.parametrize(
    ("kind", "thread"), [(FailingAtLaunch, "replica-fake_0"), (FakeEncoder, "results-fake_0")]
)
def test_batch_runs_again_if_its_thread_is_interrupted(
    serve_faulty: Serve,
    kind: type[FakeEncoder],
    thread: str,
    gate: threading.Event,
    log: pytest.LogCaptureFixture,
) -> None:
    held = Held(gate)
    served = serve_faulty(kind(held), max_wait_ms=200.0)  # so that the first batch has several images
    callers = InBackground(served.port, requests(40))
    eventually(held.is_at_work.is_set)
    served.wait_until_in_flight(40)
    kill(thread)
    time.sleep(0.05)
    gate.set()
    check_answered(callers.answers(), callers.requests)
    assert served.check_settled(40) == {200: 40}
    assert complaints(log) == []


def check_lost(
    served: Served,
    callers: InBackground,
    upload: HeldUpload,
    num_devices: int,
    log: pytest.LogCaptureFixture,
    *,
    num_before: int = 0,
    num_lines: int = 1,
) -> None:
    """One device is lost. The other one, if there is one, finishes the rest. Then the server ends by itself.

    The open `upload` keeps the server running until every request has been accepted or refused.
    """
    answers = callers.answers()
    refused = [answer for answer in answers if answer.status != 200]
    assert {(answer.status, answer.code) for answer in refused} <= {(503, "device_failed")}
    assert all(answer.headers["retry-after"] == "5" for answer in refused)
    fine = [
        (answer, levels)
        for answer, levels in zip(answers, callers.requests, strict=True)
        if answer.status == 200
    ]
    check_answered([answer for answer, _ in fine], [levels for _, levels in fine])
    if num_devices == 1:
        assert fine == []
    assert httpx.get(f"http://127.0.0.1:{served.port}/healthz").status_code == 503
    upload.leave()
    served.wait_for_the_end()
    assert served.engine.state is State.FAILED  # so that the process exits with 1
    assert served.check_settled(len(answers) + num_before + 1)[499] == 1
    assert served.scrape().total("device_up") == num_devices - 1
    assert len([line for line in complaints(log) if "ends without it" not in line]) == num_lines


def queue(max_wait_s: float = 0.0) -> Batcher:
    limits = QueueLimits(max_batch_tokens=1000, max_queue_tokens=1000, max_wait_s=max_wait_s)
    batcher = Batcher(limits, observe=lambda stats: None, on_lost=lambda error: None)
    for name in ("first", "second"):
        batcher.add_device(name)
    return batcher


def put(batcher: Batcher, num_images: int) -> None:
    patches = Preprocessor(CONFIG)(np.zeros((64, 64, 3), dtype=np.uint8))
    ticket = Ticket()
    batcher.reserve(ticket, num_images * patches.num_tokens)
    batcher.put(ticket, [EncodeItem(patches, OutputSpec(pooled=True, deepstack=False))] * num_images)


def test_device_whose_thread_died_while_idle_gets_no_share() -> None:
    async def scenario() -> int:
        batcher = queue()
        with ThreadPoolExecutor(1, thread_name_prefix="taking") as pool:
            taking = pool.submit(batcher.take, "first")
            await asyncio.sleep(0.05)
            kill("taking_0")
            put(batcher, 4)  # wakes the thread, which then exits
            with pytest.raises(SystemExit):
                taking.result(10)
        batcher.lose("first", DeviceError("first", SystemExit()))
        taken = batcher.take("second")
        assert taken is not None
        return len(taken[0])

    assert asyncio.run(scenario()) == 4


def test_waiting_for_more_images_always_ends() -> None:
    async def scenario() -> None:
        with ThreadPoolExecutor(1) as pool:
            for number in range(2000):  # some waits end while `take` computes whether they have
                batcher = queue(max_wait_s=number % 100 * 2e-7)
                put(batcher, 1)
                taking = pool.submit(batcher.take, "first")
                try:
                    assert taking.result(10) is not None
                finally:
                    batcher.close()

    asyncio.run(scenario())

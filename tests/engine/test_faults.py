"""Faults under load, with fake encoders.

Each accepted request whose caller stays gets one answer, and no ticket, task or reserved token remains.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from models import DeviceError, EncodeItem, OutputSpec, Preprocessor
from service.config.settings import Settings
from service.engine.engine import State
from service.queue.batcher import Batcher
from service.queue.queue_records import QueueLimits
from service.queue.ticket import Ticket
from tests.support.app import CONFIG, FakeEncoder, FakeRunning
from tests.support.serving import HeldUpload, Served, call_all, embeddings_of, request_of
from tests.support.traffic import Answer, call, leave
from tests.support.waiting import eventually

Serve = Callable[..., Served]

# Batches are small, so that there are many.
SETTINGS = Settings(decode_threads=2, max_batch_tokens=24, max_queue_tokens=4096)


def level_of(item: EncodeItem) -> int:
    """The gray level of an image that a fake encoder encodes."""
    return int(item.patches.pixels.flatten()[0])


def slowly(items: Sequence[EncodeItem]) -> None:
    time.sleep(0.003)


class Held:
    """Holds the batches of a fake encoder until the gate opens. With `error`, the first batch then fails."""

    def __init__(self, gate: threading.Event, error: BaseException | None = None) -> None:
        self.is_at_work = threading.Event()
        self._gate = gate
        self._error = error

    def __call__(self, items: Sequence[EncodeItem]) -> None:
        self.is_at_work.set()
        while not self._gate.is_set():  # runs Python, so that `kill` can raise an exception here
            time.sleep(0.001)
        if self._error is not None:
            error, self._error = self._error, None
            raise error


class FailingAtLaunch(FakeEncoder):
    """Fails in the launching thread, as happens when memory for activations runs out."""

    def launch(self, items: Sequence[EncodeItem]) -> FakeRunning:
        self._fail(items)
        return super().launch(items)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers, waits until they are ready, and stops them at the end."""
    started: list[Served] = []

    def start(*encoders: FakeEncoder, **changes: Any) -> Served:
        served = Served(Settings(**{**SETTINGS.model_dump(exclude_unset=True), **changes}), *encoders)
        started.append(served)
        served.wait_for(State.READY)
        return served

    yield start
    for served in started:
        served.stop()
        served.wait_for_the_end()


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "service")
    return caplog


def complaints(log: pytest.LogCaptureFixture) -> list[str]:
    """The log lines from WARNING upwards, except the warning of every demo server."""
    return [
        record.getMessage()
        for record in log.records
        if record.levelno >= logging.WARNING and not record.getMessage().startswith("model demo")
    ]


def check_answered(answers: Sequence[Answer], requests: Sequence[Sequence[int]]) -> None:
    for answer, levels in zip(answers, requests, strict=True):
        assert (answer.status, answer.body) == (200, answer.body)
        assert answer.embeddings == embeddings_of(*levels)


def requests(number: int, *, seed: int = 0, levels: range = range(1, 250)) -> list[list[int]]:
    """Requests of one to three images of random gray levels."""
    rng = random.Random(seed)
    return [rng.choices(levels, k=rng.choice([1, 1, 2, 3])) for _ in range(number)]


def kill(thread_name: str) -> None:
    """Raises `SystemExit` in a thread as soon as it runs Python code."""
    # The newest thread of this name: older ones belong to lost devices and may never end.
    ident = [thread.ident for thread in threading.enumerate() if thread.name == thread_name][-1]
    assert ident is not None
    pending = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))
    assert pending == 1


class InBackground:
    """Sends all requests at once. `answers` waits for their answers."""

    def __init__(self, port: int, requests: Sequence[Sequence[int]]) -> None:
        self.requests = requests
        self._pool = ThreadPoolExecutor(1)
        self._answers = self._pool.submit(asyncio.run, call_all(port, requests))

    def answers(self) -> list[Answer]:
        answers = self._answers.result(30)
        self._pool.shutdown()
        return answers


@pytest.mark.parametrize("num_devices", [1, 2])
def test_callers_that_leave_do_not_disturb_others(
    serve: Serve, num_devices: int, log: pytest.LogCaptureFixture
) -> None:
    served = serve(*(FakeEncoder(slowly) for _ in range(num_devices)))
    wanted, rng = requests(150), random.Random(1)
    leaving = set(rng.sample(range(len(wanted)), 45))

    async def act(index: int) -> Answer | None:
        await asyncio.sleep(index / 500)
        request = request_of(*wanted[index])
        if index not in leaving:
            return await call(served.port, request)
        num_bytes = rng.choice([len(request), len(request), rng.randrange(len(request))])
        await leave(
            served.port, request, num_bytes=num_bytes, wait_s=rng.uniform(0, 0.06), reset=index % 2 == 0
        )
        return None

    async def act_all() -> list[Answer | None]:
        return await asyncio.gather(*(act(index) for index in range(len(wanted))))

    answers = asyncio.run(act_all())
    stayed = [(answer, wanted[index]) for index, answer in enumerate(answers) if answer is not None]
    check_answered([answer for answer, _ in stayed], [levels for _, levels in stayed])
    statuses = served.check_settled(len(wanted))
    assert set(statuses) == {200, 499}
    assert 10 <= statuses[499] <= 45  # some callers leave just after their answer was sent
    assert complaints(log) == []


@pytest.mark.parametrize(
    ("kind", "error"), [(FakeEncoder, RuntimeError), (FailingAtLaunch, torch.OutOfMemoryError)]
)
def test_failed_image_does_not_fail_other_requests_of_its_batch(
    serve: Serve, kind: type[FakeEncoder], error: type[Exception], log: pytest.LogCaptureFixture
) -> None:
    def fail(items: Sequence[EncodeItem]) -> None:
        slowly(items)
        if any(level_of(item) in (66, 77) for item in items):
            raise error("odd shape")

    served = serve(kind(fail))
    wanted = [*requests(60, levels=range(80, 250)), [66], [90, 77, 91], [92, 66, 77]]
    random.Random(2).shuffle(wanted)
    answers = asyncio.run(call_all(served.port, wanted))
    broken = [(answer, levels) for answer, levels in zip(answers, wanted, strict=True) if min(levels) < 80]
    for answer, levels in broken:
        assert (answer.status, answer.code) == (500, "internal_error")
        culprits = [f"images[{index}]" for index, level in enumerate(levels) if level < 80]
        assert answer.body["error"]["param"] in culprits
        assert "odd shape" not in str(answer.body)
    fine = [(answer, levels) for answer, levels in zip(answers, wanted, strict=True) if min(levels) >= 80]
    check_answered([answer for answer, _ in fine], [levels for _, levels in fine])
    assert served.check_settled(len(wanted)) == {200: 60, 500: 3}
    assert len(complaints(log)) == 3
    assert served.engine.state is State.READY


def test_late_body_is_answered_408_even_if_the_request_times_out_too(serve: Serve) -> None:
    served = serve(FakeEncoder(), request_timeout_s=0.1, body_timeout_s=0.1)
    upload = HeldUpload(served.port)
    assert served.check_settled(1) == {408: 1}
    upload.leave()


@pytest.mark.parametrize("num_devices", [1, 2])
def test_requests_past_their_deadline_are_answered_while_the_device_is_busy(
    serve: Serve, num_devices: int, gate: threading.Event, log: pytest.LogCaptureFixture
) -> None:
    served = serve(*(FakeEncoder(Held(gate)) for _ in range(num_devices)), request_timeout_s=0.5)
    late = requests(40)
    answers = asyncio.run(call_all(served.port, late))  # returns while the gate is still closed
    assert Counter((answer.status, answer.code) for answer in answers) == {(504, "deadline_exceeded"): 40}
    assert served.scrape().total("queue_images") == 0
    gate.set()
    in_time = requests(20, seed=1)
    check_answered(asyncio.run(call_all(served.port, in_time)), in_time)
    assert served.check_settled(60) == {200: 20, 504: 40}
    encoded = sum(len(items) for encoder in served.encoders for items in encoder.batches)
    assert encoded == served.scrape().total("images_total") < sum(map(len, late + in_time))
    assert complaints(log) == []


def test_slow_device_answers_each_request_before_its_deadline_or_504(
    serve: Serve, log: pytest.LogCaptureFixture
) -> None:
    def very_slowly(items: Sequence[EncodeItem]) -> None:
        time.sleep(0.05)

    served = serve(FakeEncoder(very_slowly), request_timeout_s=0.5)
    wanted = requests(60)
    answers = asyncio.run(call_all(served.port, wanted))
    fine = [(answer, levels) for answer, levels in zip(answers, wanted, strict=True) if answer.status == 200]
    check_answered([answer for answer, _ in fine], [levels for _, levels in fine])
    statuses = served.check_settled(60)
    assert set(statuses) == {200, 504}
    assert complaints(log) == []


def test_stop_without_delay_finishes_accepted_requests_and_refuses_new_ones(
    serve: Serve, gate: threading.Event, log: pytest.LogCaptureFixture
) -> None:
    served = serve(FakeEncoder(Held(gate)))
    accepted = InBackground(served.port, requests(40))
    served.wait_until_in_flight(40)
    served.stop()
    served.wait_for(State.DRAINING)
    newcomers = asyncio.run(call_all(served.port, requests(5)))
    assert {(answer.status, answer.code) for answer in newcomers} == {(503, "draining")}
    gate.set()
    check_answered(accepted.answers(), accepted.requests)
    served.wait_for_the_end()
    assert served.check_settled(45) == {200: 40, 503: 5}
    assert complaints(log) == []


def test_stop_with_delay_accepts_requests_until_the_delay_is_over(
    serve: Serve, gate: threading.Event, log: pytest.LogCaptureFixture
) -> None:
    served = serve(FakeEncoder(Held(gate)), shutdown_delay_s=1.0)
    early = InBackground(served.port, requests(20))
    served.wait_until_in_flight(20)
    served.stop()
    served.wait_for(State.LEAVING)
    late = InBackground(served.port, requests(20, seed=1))
    served.wait_until_in_flight(40)
    assert served.engine.state is State.LEAVING
    assert httpx.get(f"http://127.0.0.1:{served.port}/readyz").json()["error"]["code"] == "draining"
    served.wait_for(State.DRAINING)
    [newcomer] = asyncio.run(call_all(served.port, [[5]]))
    assert (newcomer.status, newcomer.code) == (503, "draining")
    gate.set()
    for callers in (early, late):
        check_answered(callers.answers(), callers.requests)
    served.wait_for_the_end()
    assert served.check_settled(41) == {200: 40, 503: 1}
    assert complaints(log) == []


@pytest.mark.parametrize("num_devices", [1, 2])
def test_device_error_fails_only_the_requests_of_that_device(
    serve: Serve, num_devices: int, gate: threading.Event, log: pytest.LogCaptureFixture
) -> None:
    lost, healthy = Held(gate, torch.AcceleratorError("illegal memory access")), Held(gate)
    served = serve(*[FakeEncoder(lost), FakeEncoder(healthy)][:num_devices])
    callers = InBackground(served.port, requests(60))
    upload = HeldUpload(served.port)
    served.wait_until_in_flight(61)
    eventually(lost.is_at_work.is_set)
    gate.set()
    check_lost(served, callers, upload, num_devices, log)
    assert "illegal memory access" in complaints(log)[0]


@pytest.mark.parametrize("num_devices", [1, 2])
def test_stuck_device_is_lost(
    serve: Serve, num_devices: int, gate: threading.Event, log: pytest.LogCaptureFixture
) -> None:
    encoders = [FakeEncoder(Held(gate)), FakeEncoder(slowly)][:num_devices]
    served = serve(*encoders, device_timeout_s=0.5)
    upload = HeldUpload(served.port)
    served.wait_until_in_flight(1)
    callers = InBackground(served.port, requests(60))
    check_lost(served, callers, upload, num_devices, log)
    assert "finished nothing for 0.5 s" in complaints(log)[0]


@pytest.mark.parametrize("num_devices", [1, 2])
def test_device_is_lost_if_its_launching_thread_dies(
    serve: Serve, num_devices: int, log: pytest.LogCaptureFixture
) -> None:
    served = serve(*(FakeEncoder(slowly) for _ in range(num_devices)))
    first = requests(10)
    check_answered(asyncio.run(call_all(served.port, first)), first)
    eventually(lambda: served.engine.is_idle)
    upload = HeldUpload(served.port)
    served.wait_until_in_flight(1)
    kill("replica-fake_0" if num_devices == 1 else "replica-fake:0_0")  # it waits for a batch
    callers = InBackground(served.port, requests(30))
    check_lost(served, callers, upload, num_devices, log, num_before=10)
    assert "SystemExit" in complaints(log)[0]


def test_device_is_stuck_if_its_finishing_thread_dies(serve: Serve, log: pytest.LogCaptureFixture) -> None:
    served = serve(FakeEncoder(slowly), device_timeout_s=0.5)
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
    serve: Serve,
    kind: type[FakeEncoder],
    thread: str,
    gate: threading.Event,
    log: pytest.LogCaptureFixture,
) -> None:
    held = Held(gate)
    served = serve(kind(held), max_wait_ms=200.0)  # so that the first batch has several images
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

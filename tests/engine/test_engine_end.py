"""The engine that leaves, drains and closes, and with several replicas."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from prometheus_client import CollectorRegistry

from models import EncodeItem, ModelError, ReplicaGroup
from models.replica import MAX_LAUNCHED
from service.answers.dtypes import dtype_name
from service.engine.engine import Engine, State
from tests.support.app import FakeEncoder, FakeGraphs
from tests.support.engines import StartEngine, accept, code_of, code_of_error, fail_with, make_engine, put
from tests.support.queueing import Callers
from tests.support.waiting import eventually

DEVICES = ("fake:0", "fake:1")


def test_leaving_engine_is_not_ready_and_accepts_requests_until_it_drains(
    start_engine: StartEngine, registry: CollectorRegistry
) -> None:
    engine = start_engine()
    engine.leave()
    assert code_of(engine.check_ready) == "draining"
    assert registry.get_sample_value("vision_sidecar_ready") == 0
    engine.check_alive()
    accept(engine)
    engine.drain()
    assert code_of(lambda: accept(engine)) == "draining"


def test_engine_that_leaves_while_loading_refuses_requests(
    start_engine: StartEngine, gate: threading.Event
) -> None:
    engine = start_engine(load=gate.wait, wait=False)
    engine.leave()
    assert engine.state is State.DRAINING
    gate.set()
    eventually(lambda: engine.close())
    assert engine.state is State.DRAINING


class LoadedAfterFirstUse:
    """A lock. When its first use by this thread ends, loading ends as well."""

    def __init__(self, lock: threading.Lock, end_loading: Callable[[], None]) -> None:
        self._lock = lock
        self._end_loading = end_loading
        self._thread = threading.get_ident()
        self._is_used = False

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        if not self._is_used and threading.get_ident() == self._thread:
            self._is_used = True
            self._end_loading()


def test_leaving_engine_does_not_become_ready_if_loading_ends_meanwhile(
    start_engine: StartEngine, gate: threading.Event
) -> None:
    engine = start_engine(load=gate.wait, wait=False)

    def end_loading() -> None:
        gate.set()
        eventually(lambda: engine.state is not State.LOADING)

    engine._lock = LoadedAfterFirstUse(engine._lock, end_loading)  # type: ignore[assignment]
    engine.leave()
    eventually(lambda: engine.close())
    assert engine.state is State.DRAINING


def test_draining_engine_refuses_requests_and_finishes_accepted_ones(
    start_engine: StartEngine, callers: Callers
) -> None:
    engine = start_engine()
    with engine.accept():
        engine.drain()
        assert code_of(engine.check_ready) == code_of(lambda: accept(engine)) == "draining"
        engine.check_alive()
        assert not engine.is_idle
        assert len(callers.outcome(put(callers, engine))) == 1
    eventually(lambda: engine.is_idle)


def test_draining_engine_does_not_become_ready_when_loading_ends(
    start_engine: StartEngine, gate: threading.Event
) -> None:
    engine = start_engine(load=gate.wait, wait=False)
    engine.drain()
    gate.set()
    eventually(lambda: engine.close())
    assert engine.state is State.DRAINING


@pytest.mark.parametrize("stop", [Engine.leave, Engine.drain])
def test_failed_engine_stays_failed_when_it_is_told_to_stop(
    start_engine: StartEngine, callers: Callers, stop: Callable[[Engine], None]
) -> None:
    engine = start_engine(fail_with(torch.AcceleratorError("lost")))
    callers.error(put(callers, engine))
    stop(engine)
    assert engine.state is State.FAILED


def test_engine_does_not_close_while_a_batch_is_on_a_device(
    start_engine: StartEngine, callers: Callers, gate: threading.Event
) -> None:
    def hold(items: Sequence[EncodeItem]) -> None:
        gate.wait()

    engine = start_engine(FakeEncoder(hold))
    tickets = []
    for _ in range(MAX_LAUNCHED):
        tickets.append(put(callers, engine))
        eventually(lambda: engine.batcher.waiting_images == 0)
    abandoned = put(callers, engine)
    assert not engine.is_idle
    assert engine.close() is False
    for ticket in (abandoned, tickets[0]):
        engine.batcher.cancel(ticket)
    assert engine.batcher.waiting_images == 0
    assert (
        engine.close() is False
    )  # the batch of `tickets[0]` is still on the device, although it was cancelled
    gate.set()
    assert len(callers.outcome(tickets[1])) == 1
    eventually(lambda: engine.is_idle)
    assert engine.close() is True


def test_engine_can_be_closed_before_it_is_started(registry: CollectorRegistry) -> None:
    def never() -> ReplicaGroup:
        raise AssertionError("not started")

    assert make_engine(never, registry).close() is True


def test_engine_is_ready_once_all_replicas_are_loaded(
    start_engine: StartEngine, registry: CollectorRegistry, gate: threading.Event
) -> None:
    first = threading.Lock()

    def load() -> None:
        if not first.acquire(blocking=False):
            gate.wait()

    engine = start_engine(FakeEncoder(), FakeEncoder(), load=load, wait=False)

    def ups() -> list[float | None]:
        return [registry.get_sample_value("vision_sidecar_device_up", {"device": d}) for d in DEVICES]

    eventually(lambda: ups() in ([0, 1], [1, 0]))
    assert code_of(engine.check_loaded) == "not_ready"
    assert engine.state is State.LOADING
    gate.set()
    eventually(lambda: engine.state is State.READY)
    assert ups() == [1, 1]
    assert engine.devices == DEVICES


def test_two_replicas_that_fail_to_load_log_one_line(
    start_engine: StartEngine, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    first = threading.Lock()

    def load() -> None:
        if first.acquire(blocking=False):
            raise ModelError("no memory")
        gate.wait()
        raise ModelError("no memory either")

    engine = start_engine(FakeEncoder(), FakeEncoder(), load=load)
    assert engine.state is State.FAILED
    assert engine.close() is False  # the other replica is still loading
    gate.set()
    eventually(engine.close)
    assert engine.state is State.FAILED
    assert [record.getMessage() for record in caplog.records] == ["cannot load model m: no memory"]


@pytest.mark.parametrize(
    ("error", "has_trace"),
    [(ModelError("this process sees 1 CUDA device"), False), (RuntimeError("no driver"), True)],
)
def test_failed_start_fails_the_engine_and_logs_one_line(
    registry: CollectorRegistry, error: Exception, has_trace: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> ReplicaGroup:
        raise error

    engine = make_engine(fail, registry)
    engine.start()
    assert engine.state is State.FAILED
    assert engine.close() is True
    [record] = caplog.records
    assert record.getMessage() == f"cannot load model m: {error}"
    assert (record.exc_info is not None) == has_trace


@pytest.mark.parametrize(
    "fact", ["graphs", "fingerprint"]
)  # a fact of one replica, and one of the whole model
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_engine_fails_if_a_fact_of_the_model_is_missing(
    start_engine: StartEngine, fact: str, num_replicas: int, caplog: pytest.LogCaptureFixture
) -> None:
    encoders = [FakeEncoder() for _ in range(num_replicas)]
    for encoder in encoders:
        delattr(encoder, fact)
    engine = start_engine(*encoders)
    assert engine.state is State.FAILED
    assert code_of(engine.check_alive) == "device_failed"
    [record] = caplog.records
    assert record.getMessage().startswith("cannot load model m: ")
    assert record.exc_info is not None
    eventually(engine.close)  # no replica counts as loading


def test_failed_watch_fails_the_engine_and_cancelled_watch_does_not(
    start_engine: StartEngine, callers: Callers, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start_engine()

    async def end(error: Exception | None) -> None:
        async def watch() -> None:
            await asyncio.sleep(10 if error is None else 0)
            assert error is not None
            raise error

        watching = asyncio.create_task(watch())
        watching.add_done_callback(engine.on_watch_ended)
        if error is None:
            watching.cancel()
        await asyncio.wait([watching])

    callers.runner.run(end(None))
    engine.check_alive()
    callers.runner.run(end(RuntimeError("no clock")))
    assert code_of(engine.check_alive) == "device_failed"
    [record] = caplog.records
    assert (record.levelname, record.getMessage()) == ("CRITICAL", "cannot watch the devices: no clock")
    assert record.exc_info is not None


def test_loss_of_one_device_fails_the_engine_while_the_other_finishes(
    start_engine: StartEngine, registry: CollectorRegistry, callers: Callers, gate: threading.Event
) -> None:
    def hold(items: Sequence[EncodeItem]) -> None:
        assert gate.wait(10)

    engine = start_engine(FakeEncoder(hold), fail_with(torch.AcceleratorError("illegal memory access")))
    tickets = []
    while engine.state is not State.FAILED:  # the first device is blocked, so the second one takes a batch
        tickets.append(put(callers, engine))
        time.sleep(0.002)
    lost = [ticket for ticket in tickets if ticket.ended]
    assert {code_of_error(callers.error(ticket)) for ticket in lost} == {"device_failed"}
    kept = [ticket for ticket in tickets if not ticket.ended] + [put(callers, engine)]
    assert not engine.is_idle
    gate.set()
    for ticket in kept:
        assert len(callers.outcome(ticket)) == 1
    eventually(lambda: engine.is_idle)
    for device, up in zip(DEVICES, (1, 0), strict=True):
        assert registry.get_sample_value("vision_sidecar_device_up", {"device": device}) == up
    assert engine.close() is False  # the thread of the lost device is not ended
    assert engine.state is State.FAILED


def test_batch_is_counted_for_the_device_that_took_it(
    start_engine: StartEngine, registry: CollectorRegistry, callers: Callers
) -> None:
    busy = [threading.Event() for _ in DEVICES]

    def wait_for_the_other(own: threading.Event, items: Sequence[EncodeItem]) -> None:
        own.set()
        assert all(event.wait(10) for event in busy)

    graphs = FakeGraphs({64: None})
    engine = start_engine(*[FakeEncoder(partial(wait_for_the_other, own), graphs) for own in busy])
    tickets = []
    for _ in range(MAX_LAUNCHED + 1):  # more batches than one device has room for
        tickets.append(put(callers, engine))
        eventually(lambda: engine.batcher.waiting_images == 0)
    for ticket in tickets:
        callers.outcome(ticket)
    name = "vision_sidecar_encoder_cudagraph"
    hits = [registry.get_sample_value(f"{name}_hits_total", {"device": device}) or 0 for device in DEVICES]
    replays = [
        registry.get_sample_value(f"{name}_replays_total", {"device": device, "budget": "64"})
        for device in DEVICES
    ]
    assert min(hits) >= 1
    assert hits == replays
    assert sum(hits) == registry.get_sample_value("vision_sidecar_images_total") == len(tickets)
    assert registry.get_sample_value("vision_sidecar_batch_images_count") == len(tickets)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")])
def test_dtype_names(dtype: torch.dtype, name: str) -> None:
    assert dtype_name(dtype) == name

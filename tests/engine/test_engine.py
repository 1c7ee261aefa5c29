"""The engine from loading to the loss of devices."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import pytest
import torch
from prometheus_client import CollectorRegistry

from models import EncodeItem, ModelError, Replica, ReplicaGroup
from models.replica import Queue
from service.engine.engine import State
from service.errors import ApiError, BadRequest, InternalError
from service.metrics import Metrics
from service.queue.ticket import Ticket
from tests.support.app import FakeEncoder
from tests.support.engines import StartEngine, accept, code_of, code_of_error, fail_with, make_engine, put
from tests.support.queueing import Callers, item
from tests.support.waiting import eventually


def fail_late(gate: threading.Event) -> FakeEncoder:
    def fail(items: Sequence[EncodeItem]) -> None:
        gate.wait()
        raise torch.AcceleratorError("illegal memory access")

    return FakeEncoder(fail)


def test_engine_is_alive_but_not_ready_while_loading(
    start_engine: StartEngine, gate: threading.Event
) -> None:
    engine = start_engine(load=gate.wait, wait=False)
    engine.check_alive()
    assert {
        code_of(check) for check in (engine.check_ready, engine.check_loaded, lambda: accept(engine))
    } == {"not_ready"}
    gate.set()
    eventually(lambda: engine.state is State.READY)
    engine.check_ready()
    assert engine.encoder.fingerprint == "f" * 64


class SlowInfo(Metrics):
    """Metrics whose `set_info` blocks until the gate opens."""

    def __init__(self, registry: CollectorRegistry, gate: threading.Event) -> None:
        super().__init__(registry, ())
        self.has_begun = threading.Event()
        self._gate = gate

    def set_info(self, *, model: str, fingerprint: str, dtype: str, attn_backend: str, version: str) -> None:
        self.has_begun.set()
        self._gate.wait()


def test_requests_are_refused_until_the_engine_is_ready(
    start_engine: StartEngine, registry: CollectorRegistry, gate: threading.Event
) -> None:
    metrics = SlowInfo(registry, gate)
    has_started = threading.Event()
    engine = start_engine(load=has_started.wait, wait=False, metrics=metrics)
    has_started.set()
    assert metrics.has_begun.wait(10)
    assert engine.state is State.LOADING
    for check in (engine.check_ready, engine.check_room, engine.check_loaded, lambda: accept(engine)):
        assert code_of(check) == "not_ready"
    gate.set()
    eventually(lambda: engine.state is State.READY)
    accept(engine)


def test_metrics_say_whether_the_engine_is_ready(
    start_engine: StartEngine, gate: threading.Event, registry: CollectorRegistry
) -> None:
    engine = start_engine(load=gate.wait, wait=False)
    assert registry.get_sample_value("vision_sidecar_ready") == 0
    gate.set()
    eventually(lambda: engine.state is State.READY)
    assert registry.get_sample_value("vision_sidecar_ready") == 1
    assert registry.get_sample_value("vision_sidecar_device_up", {"device": "fake"}) == 1
    info = {"model": "m", "fingerprint": "f" * 64, "dtype": "float32", "attn_backend": "FAKE", "version": "1"}
    assert registry.get_sample_value("vision_sidecar_info", info) == 1
    engine.drain()
    assert registry.get_sample_value("vision_sidecar_ready") == 0


@pytest.mark.parametrize(
    ("error", "has_trace"), [(ModelError("no such folder"), False), (KeyError("weights"), True)]
)
def test_failed_load_fails_the_engine_and_logs_one_line(
    start_engine: StartEngine, error: Exception, has_trace: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> None:
        raise error

    engine = start_engine(load=load)
    assert engine.state is State.FAILED
    assert code_of(engine.check_alive) == "device_failed"
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.getMessage().startswith("cannot load model m")
    assert (record.exc_info is not None) == has_trace


def test_batch_is_counted_if_its_embeddings_are_not_awaited(
    start_engine: StartEngine, registry: CollectorRegistry, callers: Callers
) -> None:
    engine = start_engine()
    ticket = put(callers, engine, 3)
    eventually(lambda: engine.is_idle)
    assert registry.get_sample_value("vision_sidecar_images_total") == 3
    assert registry.get_sample_value("vision_sidecar_image_tokens_total") == 12
    misses = {"device": "fake", "reason": "disabled"}
    assert registry.get_sample_value("vision_sidecar_encoder_cudagraph_misses_total", misses) == 3
    assert ticket.ended


def test_failed_batch_does_not_end_its_device(start_engine: StartEngine, callers: Callers) -> None:
    engine = start_engine(fail_with(RuntimeError("odd shape")))
    error = callers.error(put(callers, engine))
    assert isinstance(error, InternalError)
    assert error.param == "images[0]"
    assert str(error.__cause__) == "odd shape"
    assert engine.state is State.READY


def test_requests_are_refused_once_the_only_device_is_lost(
    start_engine: StartEngine, registry: CollectorRegistry, callers: Callers
) -> None:
    engine = start_engine(fail_with(torch.AcceleratorError("illegal memory access")))
    assert code_of_error(callers.error(put(callers, engine))) == "device_failed"
    calls = (lambda: accept(engine), engine.check_alive, engine.check_ready, lambda: put(callers, engine))
    for call in calls:
        assert code_of(call) == "device_failed"
    assert registry.get_sample_value("vision_sidecar_device_up", {"device": "fake"}) == 0
    assert registry.get_sample_value("vision_sidecar_ready") == 0


def test_engine_has_failed_before_requests_of_a_lost_device_end(
    start_engine: StartEngine, callers: Callers
) -> None:
    engine = start_engine(fail_with(torch.AcceleratorError("illegal memory access")))
    states: list[State] = []
    ticket = callers.ticket()

    class Watched(Ticket):
        def failed(self, error: Exception) -> None:
            states.append(engine.state)
            super().failed(error)

    ticket.__class__ = Watched
    engine.batcher.reserve(ticket, 4)
    engine.batcher.put(ticket, [item(4)])
    callers.error(ticket)
    assert states == [State.FAILED]


def test_lost_device_is_logged_as_one_line(
    start_engine: StartEngine, callers: Callers, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start_engine(fail_with(torch.AcceleratorError("illegal memory access")))
    callers.error(put(callers, engine))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("CRITICAL", "device fake is lost: illegal memory access")
    ]


def test_device_that_has_work_and_finishes_none_is_lost(
    start_engine: StartEngine, registry: CollectorRegistry, callers: Callers, gate: threading.Event
) -> None:
    engine = start_engine(fail_late(gate))

    async def watch_until_answered(ticket: Ticket) -> Exception:
        watching = asyncio.create_task(engine.watch(0.1))
        try:
            await asyncio.wait_for(ticket.embeddings(), 10)
        except ApiError as error:
            return error
        finally:
            watching.cancel()
        raise AssertionError("the request succeeded")

    error = callers.runner.run(watch_until_answered(put(callers, engine)))
    assert code_of_error(error) == "device_failed"
    assert code_of(engine.check_alive) == "device_failed"
    assert registry.get_sample_value("vision_sidecar_device_up", {"device": "fake"}) == 0
    assert engine.is_idle
    assert engine.close() is False  # the thread of the device ends only with the process


def test_idle_device_is_not_given_up(start_engine: StartEngine, callers: Callers) -> None:
    engine = start_engine()

    async def watch() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.watch(0.01), 0.1)

    callers.outcome(put(callers, engine))
    callers.runner.run(watch())
    assert engine.state is State.READY


class Dying(Replica):
    """A replica whose launching thread ends when the test sets an error in `serving`."""

    def __init__(self) -> None:
        super().__init__("fake", FakeEncoder)  # type: ignore[arg-type]
        self.serving: Future[None] = Future()

    def serve(self, queue: Queue) -> Future[None]:
        return self.serving


def test_device_is_lost_when_its_thread_ends(registry: CollectorRegistry, callers: Callers) -> None:
    replica = Dying()
    engine = make_engine(lambda: ReplicaGroup([replica]), registry)
    engine.start()
    eventually(lambda: engine.state is State.READY)
    ticket = put(callers, engine)
    replica.serving.set_exception(SystemExit())
    assert code_of_error(callers.error(ticket)) == "device_failed"
    assert engine.state is State.FAILED
    replica.close()


def test_device_can_be_lost_while_another_one_is_loading(
    registry: CollectorRegistry, gate: threading.Event
) -> None:
    def load() -> FakeEncoder:
        gate.wait()
        return FakeEncoder()

    dying, loading = Dying(), Replica("other", load)  # type: ignore[arg-type]
    engine = make_engine(lambda: ReplicaGroup([dying, loading]), registry)
    engine.start()
    dying.ready.result(10)
    dying.serving.set_exception(SystemExit())
    assert engine.state is State.FAILED
    gate.set()
    loading.ready.result(10)
    engine.batcher.close()
    loading.close()
    dying.close()
    assert engine.state is State.FAILED


def test_error_of_a_client_is_kept_if_the_device_is_lost_meanwhile(
    start_engine: StartEngine, callers: Callers, gate: threading.Event
) -> None:
    engine = start_engine(fail_late(gate))
    put(callers, engine)

    def refuse() -> None:
        with engine.accept():
            gate.set()
            eventually(lambda: engine.state is State.FAILED)
            raise BadRequest("no image", code="invalid_image")

    with pytest.raises(BadRequest):
        refuse()

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import pytest
import torch
from prometheus_client import CollectorRegistry

from models import EncodeItem, ModelError, Replica, ReplicaGroup
from models.replica import MAX_LAUNCHED, Queue
from service.answers.dtypes import dtype_name
from service.engine.engine import Engine, State
from service.errors import ApiError, BadRequest, InternalError, Unavailable
from service.metrics import Metrics
from service.queue.queue_records import QueueLimits
from service.queue.ticket import Ticket
from tests.support.app import FakeEncoder, FakeGraphs, fake_replicas
from tests.support.queueing import Callers, item
from tests.support.waiting import eventually

Start = Callable[..., Engine]

DEVICES = ("fake:0", "fake:1")
LIMITS = QueueLimits(max_batch_tokens=1000, max_queue_tokens=10_000)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def make_engine(
    start_replicas: Callable[[], ReplicaGroup], registry: CollectorRegistry, metrics: Metrics | None = None
) -> Engine:
    return Engine(start_replicas, LIMITS, metrics or Metrics(registry, ()), model_name="m", version="1")


@pytest.fixture
def start(registry: CollectorRegistry) -> Iterator[Start]:
    """Starts an engine on fake encoders."""
    running: list[tuple[Engine, ReplicaGroup]] = []

    def start_engine(
        *encoders: FakeEncoder,
        load: Callable[[], object] = lambda: None,
        wait: bool = True,
        metrics: Metrics | None = None,
    ) -> Engine:
        group = fake_replicas(*(encoders or (FakeEncoder(),)), load=load)
        engine = make_engine(lambda: group, registry, metrics)
        running.append((engine, group))
        engine.start()
        if wait:
            eventually(lambda: engine.state is not State.LOADING)
        return engine

    yield start_engine
    for engine, group in running:
        engine.batcher.close()
        group.close()


def put(callers: Callers, engine: Engine, num_images: int = 1) -> Ticket:
    """Queues a request of this many images."""
    return callers.put(engine.batcher, *[item(4)] * num_images)


def code_of(check: Callable[[], object]) -> str:
    with pytest.raises(Unavailable) as caught:
        check()
    return code_of_error(caught.value)


def code_of_error(error: Exception) -> str:
    assert isinstance(error, Unavailable)
    assert error.headers() == {"Retry-After": "5"}
    return error.code


def accept(engine: Engine) -> None:
    with engine.accept():
        pass


def failing_encoder(error: BaseException) -> FakeEncoder:
    def fail(items: Sequence[EncodeItem]) -> None:
        raise error

    return FakeEncoder(fail)


def encoder_failing_at(gate: threading.Event) -> FakeEncoder:
    def fail(items: Sequence[EncodeItem]) -> None:
        gate.wait()
        raise torch.AcceleratorError("illegal memory access")

    return FakeEncoder(fail)


def test_loading_engine_is_alive_but_not_ready(start: Start, gate: threading.Event) -> None:
    engine = start(load=gate.wait, wait=False)
    engine.check_alive()
    assert {
        code_of(check) for check in (engine.check_ready, engine.check_loaded, lambda: accept(engine))
    } == {"not_ready"}
    gate.set()
    eventually(lambda: engine.state is State.READY)
    engine.check_ready()
    assert engine.encoder.fingerprint == "f" * 64


class SlowInfo(Metrics):
    """Metrics whose `set_info` waits until the gate opens."""

    def __init__(self, registry: CollectorRegistry, gate: threading.Event) -> None:
        super().__init__(registry, ())
        self.is_waiting = threading.Event()
        self._gate = gate

    def set_info(self, *, model: str, fingerprint: str, dtype: str, attn_backend: str, version: str) -> None:
        self.is_waiting.set()
        self._gate.wait()


def test_no_request_is_accepted_before_the_engine_is_ready(
    start: Start, registry: CollectorRegistry, gate: threading.Event
) -> None:
    metrics = SlowInfo(registry, gate)
    has_started = threading.Event()
    engine = start(load=has_started.wait, wait=False, metrics=metrics)
    has_started.set()
    assert metrics.is_waiting.wait(10)
    assert engine.state is State.LOADING
    for check in (engine.check_ready, engine.check_room, engine.check_loaded, lambda: accept(engine)):
        assert code_of(check) == "not_ready"
    gate.set()
    eventually(lambda: engine.state is State.READY)
    accept(engine)


def test_metrics_say_whether_the_engine_is_ready(
    start: Start, gate: threading.Event, registry: CollectorRegistry
) -> None:
    engine = start(load=gate.wait, wait=False)
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
def test_model_that_fails_to_load_is_logged_in_one_line_and_fails_the_engine(
    start: Start, error: Exception, has_trace: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> None:
        raise error

    engine = start(load=load)
    assert engine.state is State.FAILED
    assert code_of(engine.check_alive) == "device_failed"
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.getMessage().startswith("cannot load model m")
    assert (record.exc_info is not None) == has_trace


def test_batches_are_counted_even_if_no_coroutine_awaits_them(
    start: Start, registry: CollectorRegistry, callers: Callers
) -> None:
    engine = start()
    ticket = put(callers, engine, 3)
    eventually(lambda: engine.is_idle)
    assert registry.get_sample_value("vision_sidecar_images_total") == 3
    assert registry.get_sample_value("vision_sidecar_image_tokens_total") == 12
    misses = {"device": "fake", "reason": "disabled"}
    assert registry.get_sample_value("vision_sidecar_encoder_cudagraph_misses_total", misses) == 3
    assert ticket.ended


def test_failed_batch_does_not_lose_the_device(start: Start, callers: Callers) -> None:
    engine = start(failing_encoder(RuntimeError("odd shape")))
    error = callers.error(put(callers, engine))
    assert isinstance(error, InternalError)
    assert error.param == "images[0]"
    assert str(error.__cause__) == "odd shape"
    assert engine.state is State.READY


def test_all_requests_are_refused_once_the_only_device_is_lost(
    start: Start, registry: CollectorRegistry, callers: Callers
) -> None:
    engine = start(failing_encoder(torch.AcceleratorError("illegal memory access")))
    assert code_of_error(callers.error(put(callers, engine))) == "device_failed"
    calls = (lambda: accept(engine), engine.check_alive, engine.check_ready, lambda: put(callers, engine))
    for call in calls:
        assert code_of(call) == "device_failed"
    assert registry.get_sample_value("vision_sidecar_device_up", {"device": "fake"}) == 0
    assert registry.get_sample_value("vision_sidecar_ready") == 0


def test_engine_has_failed_before_the_requests_of_a_lost_device_end(start: Start, callers: Callers) -> None:
    engine = start(failing_encoder(torch.AcceleratorError("illegal memory access")))
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


def test_lost_device_is_logged_in_one_line(
    start: Start, callers: Callers, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(failing_encoder(torch.AcceleratorError("illegal memory access")))
    callers.error(put(callers, engine))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("CRITICAL", "device fake is lost: illegal memory access")
    ]


def test_device_that_has_work_and_finishes_none_is_lost(
    start: Start, registry: CollectorRegistry, callers: Callers, gate: threading.Event
) -> None:
    engine = start(encoder_failing_at(gate))

    async def watch_until_answered(ticket: Ticket) -> Exception:
        watching = asyncio.create_task(engine.watch(0.1))
        try:
            await asyncio.wait_for(ticket.embeddings(), 10)
        except ApiError as error:
            return error
        finally:
            watching.cancel()
        raise AssertionError("the request was answered")

    error = callers.runner.run(watch_until_answered(put(callers, engine)))
    assert code_of_error(error) == "device_failed"
    assert code_of(engine.check_alive) == "device_failed"
    assert registry.get_sample_value("vision_sidecar_device_up", {"device": "fake"}) == 0
    assert engine.is_idle
    assert engine.close() is False  # its thread ends only with the process


def test_idle_device_is_not_lost(start: Start, callers: Callers) -> None:
    engine = start()

    async def watch() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.watch(0.01), 0.1)

    callers.outcome(put(callers, engine))
    callers.runner.run(watch())
    assert engine.state is State.READY


class Dying(Replica):
    """A replica whose serving ends when the test ends its future."""

    def __init__(self) -> None:
        super().__init__("fake", FakeEncoder)  # type: ignore[arg-type]
        self.serving: Future[None] = Future()

    def serve(self, queue: Queue) -> Future[None]:
        return self.serving


def test_device_is_lost_if_its_thread_dies(registry: CollectorRegistry, callers: Callers) -> None:
    replica = Dying()
    engine = make_engine(lambda: ReplicaGroup([replica]), registry)
    engine.start()
    eventually(lambda: engine.state is State.READY)
    ticket = put(callers, engine)
    replica.serving.set_exception(SystemExit())
    assert code_of_error(callers.error(ticket)) == "device_failed"
    assert engine.state is State.FAILED
    replica.close()


def test_device_may_be_lost_while_another_is_loading(
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


def test_client_error_stays_a_client_error_after_the_device_is_lost(
    start: Start, callers: Callers, gate: threading.Event
) -> None:
    engine = start(encoder_failing_at(gate))
    put(callers, engine)

    def refuse() -> None:
        with engine.accept():
            gate.set()
            eventually(lambda: engine.state is State.FAILED)
            raise BadRequest("no image", code="invalid_image")

    with pytest.raises(BadRequest):
        refuse()


def test_leaving_engine_is_not_ready_but_accepts_requests_until_it_drains(
    start: Start, registry: CollectorRegistry
) -> None:
    engine = start()
    engine.leave()
    assert code_of(engine.check_ready) == "draining"
    assert registry.get_sample_value("vision_sidecar_ready") == 0
    engine.check_alive()
    accept(engine)
    engine.drain()
    assert code_of(lambda: accept(engine)) == "draining"


def test_engine_that_leaves_while_loading_accepts_no_requests(start: Start, gate: threading.Event) -> None:
    engine = start(load=gate.wait, wait=False)
    engine.leave()
    assert engine.state is State.DRAINING
    gate.set()
    eventually(lambda: engine.close())
    assert engine.state is State.DRAINING


def test_draining_engine_refuses_new_requests_and_finishes_accepted_ones(
    start: Start, callers: Callers
) -> None:
    engine = start()
    with engine.accept():
        engine.drain()
        assert code_of(engine.check_ready) == code_of(lambda: accept(engine)) == "draining"
        engine.check_alive()
        assert not engine.is_idle
        assert len(callers.outcome(put(callers, engine))) == 1
    eventually(lambda: engine.is_idle)


def test_draining_engine_stays_draining_when_loading_ends(start: Start, gate: threading.Event) -> None:
    engine = start(load=gate.wait, wait=False)
    engine.drain()
    gate.set()
    eventually(lambda: engine.close())
    assert engine.state is State.DRAINING


@pytest.mark.parametrize("stop", [Engine.leave, Engine.drain])
def test_failed_engine_stays_failed_when_it_is_stopped(
    start: Start, callers: Callers, stop: Callable[[Engine], None]
) -> None:
    engine = start(failing_encoder(torch.AcceleratorError("lost")))
    callers.error(put(callers, engine))
    stop(engine)
    assert engine.state is State.FAILED


def test_engine_does_not_close_while_a_batch_is_running(
    start: Start, callers: Callers, gate: threading.Event
) -> None:
    def hold(items: Sequence[EncodeItem]) -> None:
        gate.wait()

    engine = start(FakeEncoder(hold))
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
    assert engine.close() is False  # a batch is still running, although no request waits for it
    gate.set()
    assert len(callers.outcome(tickets[1])) == 1
    eventually(lambda: engine.is_idle)
    assert engine.close() is True


def test_engine_that_was_not_started_can_be_closed(registry: CollectorRegistry) -> None:
    def never() -> ReplicaGroup:
        raise AssertionError("not started")

    assert make_engine(never, registry).close() is True


def test_engine_is_ready_once_all_replicas_are_loaded(
    start: Start, registry: CollectorRegistry, gate: threading.Event
) -> None:
    first = threading.Lock()

    def load() -> None:
        if not first.acquire(blocking=False):
            gate.wait()

    engine = start(FakeEncoder(), FakeEncoder(), load=load, wait=False)

    def ups() -> list[float | None]:
        return [registry.get_sample_value("vision_sidecar_device_up", {"device": d}) for d in DEVICES]

    eventually(lambda: ups() in ([0, 1], [1, 0]))
    assert code_of(engine.check_loaded) == "not_ready"
    assert engine.state is State.LOADING
    gate.set()
    eventually(lambda: engine.state is State.READY)
    assert ups() == [1, 1]
    assert engine.devices == DEVICES


def test_engine_fails_once_if_several_replicas_fail_to_load(
    start: Start, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    first = threading.Lock()

    def load() -> None:
        if first.acquire(blocking=False):
            raise ModelError("no memory")
        gate.wait()
        raise ModelError("no memory either")

    engine = start(FakeEncoder(), FakeEncoder(), load=load)
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
def test_failed_start_of_replicas_is_logged_in_one_line_and_fails_the_engine(
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


@pytest.mark.parametrize("fact", ["graphs", "fingerprint"])  # a fact of each replica, a fact of the model
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_engine_fails_if_facts_of_the_model_are_missing(
    start: Start, fact: str, num_replicas: int, caplog: pytest.LogCaptureFixture
) -> None:
    encoders = [FakeEncoder() for _ in range(num_replicas)]
    for encoder in encoders:
        delattr(encoder, fact)
    engine = start(*encoders)
    assert engine.state is State.FAILED
    assert code_of(engine.check_alive) == "device_failed"
    [record] = caplog.records
    assert record.getMessage().startswith("cannot load model m: ")
    assert record.exc_info is not None
    eventually(engine.close)  # no replica counts as loading any more


def test_failed_watch_fails_the_engine_and_a_cancelled_one_does_not(
    start: Start, callers: Callers, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()

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


def test_engine_fails_if_one_of_two_devices_is_lost(
    start: Start, registry: CollectorRegistry, callers: Callers, gate: threading.Event
) -> None:
    def hold(items: Sequence[EncodeItem]) -> None:
        assert gate.wait(10)

    engine = start(FakeEncoder(hold), failing_encoder(torch.AcceleratorError("illegal memory access")))
    tickets = []
    while engine.state is not State.FAILED:  # the first device is held, so the other one must take a batch
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
    start: Start, registry: CollectorRegistry, callers: Callers
) -> None:
    busy = [threading.Event() for _ in DEVICES]

    def wait_for_the_other(own: threading.Event, items: Sequence[EncodeItem]) -> None:
        own.set()
        assert all(event.wait(10) for event in busy)

    graphs = FakeGraphs({64: None})
    engine = start(*[FakeEncoder(partial(wait_for_the_other, own), graphs) for own in busy])
    tickets = []
    for _ in range(MAX_LAUNCHED + 1):  # more than one device can hold
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
def test_name_of_a_dtype(dtype: torch.dtype, name: str) -> None:
    assert dtype_name(dtype) == name

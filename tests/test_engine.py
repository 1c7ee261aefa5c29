from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from prometheus_client import CollectorRegistry

from models import DeviceError, EncodeItem, ModelError, OutputSpec, Preprocessor, ReplicaGroup
from models.replica import MAX_LAUNCHED
from service.dtypes import dtype_name
from service.engine import Engine, State
from service.errors import BadRequest, Unavailable
from service.metrics import Metrics
from tests.conftest import CONFIG, FakeEncoder, FakeGraphs, fake_replicas

Start = Callable[..., Engine]

DEVICES = ("fake:0", "fake:1")


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def start(registry: CollectorRegistry) -> Iterator[Start]:
    """Starts an engine on fake encoders."""
    groups: list[ReplicaGroup] = []

    def start_engine(
        *encoders: FakeEncoder, load: Callable[[], object] = lambda: None, wait: bool = True
    ) -> Engine:
        def start_replicas() -> ReplicaGroup:
            groups.append(fake_replicas(*(encoders or (FakeEncoder(),)), load=load))
            return groups[-1]

        engine = Engine(start_replicas, Metrics(registry, ()), model_name="m", version="1")
        engine.start()
        if wait:
            eventually(lambda: engine.state is not State.LOADING)
        return engine

    yield start_engine
    for group in groups:
        group.close()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.002)


def batch(num_images: int = 1) -> list[EncodeItem]:
    patches = Preprocessor(CONFIG)(torch.zeros((64, 64, 3), dtype=torch.uint8).numpy())
    return [EncodeItem(patches, OutputSpec(pooled=True, deepstack=False))] * num_images


def code_of(check: Callable[[], object]) -> str:
    with pytest.raises(Unavailable) as caught:
        check()
    assert caught.value.headers() == {"Retry-After": "5"}
    return caught.value.code


def admit(engine: Engine) -> None:
    with engine.admit():
        pass


def fail_with(error: BaseException) -> FakeEncoder:
    def fail(items: Sequence[EncodeItem]) -> None:
        raise error

    return FakeEncoder(fail)


def fail_late(gate: threading.Event) -> FakeEncoder:
    def fail(items: Sequence[EncodeItem]) -> None:
        gate.wait()
        raise torch.AcceleratorError("illegal memory access")

    return FakeEncoder(fail)


def test_it_is_alive_but_not_ready_while_loading(start: Start, gate: threading.Event) -> None:
    engine = start(load=gate.wait, wait=False)
    engine.check_alive()
    assert {code_of(check) for check in (engine.check_ready, engine.check_loaded, lambda: admit(engine))} == {
        "not_ready"
    }
    gate.set()
    eventually(lambda: engine.state is State.READY)
    engine.check_ready()
    assert engine.encoder.fingerprint == "f" * 64


def test_ready_is_a_metric(start: Start, gate: threading.Event, registry: CollectorRegistry) -> None:
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
def test_a_model_that_cannot_be_loaded_is_a_failure_in_one_line(
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


def test_batches_are_counted_even_if_nobody_waits(start: Start, registry: CollectorRegistry) -> None:
    engine = start()
    engine.submit(batch(3))
    eventually(lambda: engine.idle)
    assert registry.get_sample_value("vision_sidecar_images_total") == 3
    assert registry.get_sample_value("vision_sidecar_image_tokens_total") == 12
    misses = {"device": "fake", "reason": "disabled"}
    assert registry.get_sample_value("vision_sidecar_encoder_cudagraph_misses_total", misses) == 3


def test_a_batch_that_fails_leaves_the_device_in_service(start: Start) -> None:
    engine = start(fail_with(RuntimeError("odd shape")))
    with pytest.raises(RuntimeError, match="odd shape"), engine.admit():
        engine.submit(batch()).result(10)
    assert engine.state is State.READY


def test_a_lost_device_turns_every_request_away(start: Start, registry: CollectorRegistry) -> None:
    engine = start(fail_with(torch.AcceleratorError("illegal memory access")))
    with pytest.raises(Unavailable) as caught, engine.admit():
        engine.submit(batch()).result(10)
    assert str(caught.value.code) == "device_failed"
    for call in (lambda: admit(engine), engine.check_alive):
        assert code_of(call) == "device_failed"
    assert registry.get_sample_value("vision_sidecar_device_up", {"device": "fake"}) == 0
    assert registry.get_sample_value("vision_sidecar_ready") == 0


def test_a_request_may_be_the_first_to_tell_of_a_lost_device(start: Start) -> None:
    engine = start()
    with pytest.raises(Unavailable), engine.admit():
        raise DeviceError("fake", torch.AcceleratorError("illegal memory access"))
    assert engine.state is State.FAILED


def test_an_error_of_the_caller_stays_one_on_a_lost_device(start: Start, gate: threading.Event) -> None:
    engine = start(fail_late(gate))
    engine.submit(batch())

    def refuse() -> None:
        with engine.admit():
            gate.set()
            eventually(lambda: engine.state is State.FAILED)
            raise BadRequest("no image", code="invalid_image")

    with pytest.raises(BadRequest):
        refuse()


def test_draining_refuses_newcomers_and_keeps_who_is_in(start: Start) -> None:
    engine = start()
    with engine.admit():
        engine.drain()
        assert code_of(engine.check_ready) == code_of(lambda: admit(engine)) == "draining"
        engine.check_alive()
        assert not engine.idle
        engine.submit(batch()).result(10)
    eventually(lambda: engine.idle)


def test_loading_that_ends_while_draining_does_not_make_it_ready(start: Start, gate: threading.Event) -> None:
    engine = start(load=gate.wait, wait=False)
    engine.drain()
    gate.set()
    eventually(lambda: engine.close())
    assert engine.state is State.DRAINING


def test_a_failure_is_not_undone_by_draining(start: Start) -> None:
    engine = start(fail_with(torch.AcceleratorError("lost")))
    engine.submit(batch()).exception(10)
    eventually(lambda: engine.state is State.FAILED)
    engine.drain()
    assert engine.state is State.FAILED


def test_a_batch_on_the_device_keeps_it_from_closing(start: Start, gate: threading.Event) -> None:
    def hold(items: Sequence[EncodeItem]) -> None:
        gate.wait()

    engine = start(FakeEncoder(hold))
    waiting = [engine.submit(batch()) for _ in range(MAX_LAUNCHED)]
    abandoned = engine.submit(batch())
    assert not engine.idle
    assert engine.close() is False
    assert abandoned.cancel()
    gate.set()
    assert all(future.result(10) for future in waiting)
    eventually(lambda: engine.idle)
    assert engine.close() is True


def test_closing_before_the_start_is_fine(registry: CollectorRegistry) -> None:
    def never() -> ReplicaGroup:
        raise AssertionError("not started")

    assert Engine(never, Metrics(registry, ()), model_name="m", version="1").close() is True


def test_it_is_ready_once_every_replica_is(
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


def test_one_replica_that_cannot_be_loaded_fails_the_engine_once(
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
    assert engine.close() is False  # the other is still being loaded
    gate.set()
    eventually(engine.close)
    assert engine.state is State.FAILED
    assert [record.getMessage() for record in caplog.records] == ["cannot load model m: no memory"]


def test_devices_that_are_not_here_are_a_failure_in_one_line(
    registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    def too_few() -> ReplicaGroup:
        raise ModelError("data_parallel_size 2 needs as many CUDA devices, and this process sees 1")

    engine = Engine(too_few, Metrics(registry, ()), model_name="m", version="1")
    engine.start()
    assert engine.state is State.FAILED
    assert engine.close() is True
    assert [record.exc_info for record in caplog.records] == [None]


def test_one_lost_device_of_two_ends_the_engine(
    start: Start, registry: CollectorRegistry, gate: threading.Event
) -> None:
    def hold(items: Sequence[EncodeItem]) -> None:
        assert gate.wait(10)

    engine = start(FakeEncoder(hold), fail_with(torch.AcceleratorError("illegal memory access")))
    healthy, lost = engine.submit(batch()), engine.submit(batch())
    with pytest.raises(DeviceError, match="device fake:1 is lost: illegal memory access"):
        lost.result(10)
    eventually(lambda: engine.state is State.FAILED)
    assert not engine.idle
    gate.set()
    assert len(healthy.result(10).embeddings) == 1
    eventually(lambda: engine.idle)
    for device, up in zip(DEVICES, (1, 0), strict=True):
        assert registry.get_sample_value("vision_sidecar_device_up", {"device": device}) == up
    assert engine.close() is True


def test_a_batch_is_counted_on_every_device_that_took_part(start: Start, registry: CollectorRegistry) -> None:
    graphs = FakeGraphs({64: None})
    engine = start(FakeEncoder(graphs=graphs), FakeEncoder(graphs=graphs))
    engine.submit(batch(4)).result(10)
    eventually(lambda: engine.idle)
    for device in DEVICES:
        labels = {"device": device}
        assert registry.get_sample_value("vision_sidecar_encoder_cudagraph_hits_total", labels) == 2
        labels = {"device": device, "budget": "64"}
        assert registry.get_sample_value("vision_sidecar_encoder_cudagraph_replays_total", labels) == 1
    assert registry.get_sample_value("vision_sidecar_images_total") == 4
    assert registry.get_sample_value("vision_sidecar_batch_images_count") == 2


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")])
def test_names_of_types(dtype: torch.dtype, name: str) -> None:
    assert dtype_name(dtype) == name

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.thread import BrokenThreadPool

import pytest
import torch
from prometheus_client import CollectorRegistry

from models import EncodeItem, ModelError, OutputSpec, Preprocessor, Replica
from service.engine import Engine, State, dtype_name
from service.errors import BadRequest, Unavailable
from service.metrics import Metrics
from tests.conftest import CONFIG, FakeEncoder

Start = Callable[..., Engine]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def start(registry: CollectorRegistry) -> Iterator[Start]:
    """Starts an engine on a fake encoder."""
    replicas: list[Replica] = []

    def start_engine(
        encoder: FakeEncoder | None = None, load: Callable[[], object] = lambda: None, *, wait: bool = True
    ) -> Engine:
        def load_fake() -> FakeEncoder:
            load()
            return encoder or FakeEncoder()

        def start_replica() -> Replica:
            replicas.append(Replica("fake", load_fake))  # type: ignore[arg-type]
            return replicas[-1]

        engine = Engine(start_replica, Metrics(registry, ()), model_name="m", version="1")
        engine.start()
        if wait:
            eventually(lambda: engine.state is not State.LOADING)
        return engine

    yield start_engine
    for replica in replicas:
        replica.close()


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
    assert registry.get_sample_value("vision_sidecar_device_up", {"device": "cpu"}) == 1
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
    misses = {"device": "cpu", "reason": "disabled"}
    assert registry.get_sample_value("vision_sidecar_encoder_cudagraph_misses_total", misses) == 3


def test_a_batch_that_fails_leaves_the_device_in_service(start: Start) -> None:
    engine = start(fail_with(RuntimeError("odd shape")))
    with pytest.raises(RuntimeError, match="odd shape"), engine.admit():
        engine.submit(batch()).result(10)
    assert engine.state is State.READY


@pytest.mark.parametrize(
    "error", [torch.AcceleratorError("illegal memory access"), BrokenThreadPool("thread died")]
)
def test_a_lost_device_turns_every_request_away(
    start: Start, error: Exception, registry: CollectorRegistry
) -> None:
    engine = start(fail_with(error))
    with pytest.raises(Unavailable) as caught, engine.admit():
        engine.submit(batch()).result(10)
    assert caught.value.code == "device_failed"
    assert code_of(lambda: admit(engine)) == code_of(engine.check_alive) == "device_failed"
    assert registry.get_sample_value("vision_sidecar_device_up", {"device": "cpu"}) == 0
    assert registry.get_sample_value("vision_sidecar_ready") == 0


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
    waiting: Future[object] = engine.submit(batch())  # type: ignore[assignment]
    abandoned = engine.submit(batch())
    assert not engine.idle
    assert engine.close() is False
    assert abandoned.cancel()
    gate.set()
    waiting.result(10)
    eventually(lambda: engine.idle)
    assert engine.close() is True


def test_closing_before_the_start_is_fine(registry: CollectorRegistry) -> None:
    def never() -> Replica:
        raise AssertionError("not started")

    assert Engine(never, Metrics(registry, ()), model_name="m", version="1").close() is True


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")])
def test_names_of_types(dtype: torch.dtype, name: str) -> None:
    assert dtype_name(dtype) == name

"""The process of a device, run on an event loop of the test. The test takes the place of the supervisor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import uvloop
from prometheus_client import Metric

from models import DeviceError, EncodeItem, ModelError, Preprocessor, Replica
from models.replica import Queue
from service.config.settings import Settings
from service.processes.device.device_process import DeviceProcess
from service.processes.wire.link import Link
from service.processes.wire.memory import SharedMemory
from service.processes.wire.messages import (
    BatchImage,
    BatchMessage,
    DeviceLoaded,
    DeviceSetup,
    Fault,
    Granted,
    Lost,
    Ping,
    Pong,
    Scrape,
    Scraped,
    Wanting,
)
from service.processes.wire.supervisor_link import SupervisorLink
from tests.support.app import CONFIG, FakeEncoder, fake_replicas, only
from tests.support.queueing import item

NAME = "fake"
NUM_SERVERS = 2


class Supervisor:
    """The other ends of the link to the supervisor and of the links to two API servers."""

    def __init__(self, settings: Settings, load: Callable[[Settings, str], Replica]) -> None:
        idleness = SharedMemory.create(1)
        self._line, self._their_line = Link.pair()
        self._line.socket.settimeout(20)
        pairs = [(Link.pair(), Link.pair()) for _ in range(NUM_SERVERS)]
        self.batches = [batches for (batches, _), _ in pairs]
        self._results = [results for _, (results, _) in pairs]
        ends = [end.socket.detach() for (_, batches), (_, results) in pairs for end in (batches, results)]
        setup = DeviceSetup(settings, NAME, 0, 1)
        self._loop = uvloop.new_event_loop()
        line = SupervisorLink(self._their_line, on_exit=self._stop)
        self._device = DeviceProcess(setup, [idleness.file, *ends], line, load)
        self._running = self._loop.create_task(self._device.run())
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._running)

    def _stop(self) -> None:
        self._running.cancel()

    def tell(self, message: object) -> None:
        self._line.send(message)

    def receive(self) -> tuple[Any, list[SharedMemory]]:
        message, files = self._line.receive()
        return message, [SharedMemory(file, message.memory_bytes) for file in files]

    def receive_fault(self) -> Exception:
        """That the model cannot be loaded."""
        message, memories = self.receive()
        assert isinstance(message, DeviceLoaded)
        assert isinstance(message.encoder, Fault)
        assert not memories
        return message.encoder.error()

    def receive_loss(self) -> DeviceError:
        message, _ = self.receive()
        assert isinstance(message, Lost)
        assert message.device == NAME
        return message.fault.device_error()

    def send_batch(self, index: int) -> None:
        """Like an API server."""
        image = item(1)
        patch_dim = image.patches.pixels.shape[1]
        self.batches[index].send(Wanting())
        message, _ = self.batches[index].receive()
        assert isinstance(message, Granted)
        images = (BatchImage(image.patches.grid_thw, image.patches.num_tokens, image.output),)
        self.batches[index].send(BatchMessage(0, images, patch_dim))

    def close(self) -> None:
        """The API servers' ends, for which the device's thread waits."""
        for link in (*self.batches, *self._results):
            link.close()

    def end(self) -> None:
        """Once that thread has ended, which tells the device's event loop. And what its process would end."""
        self._line.close()
        self._thread.join()
        self._loop.close()
        self._their_line.close()
        for client in self._device._clients:
            client.batches.close()
            client.results.close()


Start = Callable[..., Supervisor]


@pytest.fixture
def start(settings: Settings) -> Iterator[Start]:
    closing: list[Callable[[], None]] = []

    def start_supervisor(
        encoder: FakeEncoder | None = None,
        load: Callable[[], object] = lambda: None,
        load_replica: Callable[[Settings, str], Replica] | None = None,
        **changes: object,
    ) -> Supervisor:
        group = fake_replicas(encoder or FakeEncoder(), load=load, name=NAME)
        supervisor = Supervisor(
            only(settings, **changes), load_replica or (lambda settings, name: group.replicas[0])
        )
        closing.extend((supervisor.close, group.close, supervisor.end))
        return supervisor

    yield start_supervisor
    for close in closing:
        close()


def test_loaded_device_shares_memory_for_the_largest_batch_with_each_api_server(start: Start) -> None:
    supervisor = start(max_batch_tokens=1000)
    message, memories = supervisor.receive()
    assert isinstance(message, DeviceLoaded)
    assert not isinstance(message.encoder, Fault)
    config = message.encoder.preprocessor.config
    token_bytes = 3 * config.factor**2
    assert message.memory_bytes >= token_bytes * max(1000, config.max_pixels // config.factor**2)
    assert len(memories) == NUM_SERVERS
    for memory in memories:
        memory.bytes[-1] = 1
    assert len({memory.bytes.data_ptr() for memory in memories}) == NUM_SERVERS


def test_memory_holds_an_image_larger_than_the_pixel_limits(start: Start) -> None:
    encoder = FakeEncoder()
    encoder.preprocessor = Preprocessor(replace(CONFIG, min_pixels=4194304, max_pixels=4194304))
    thin = encoder.preprocessor.num_tokens(29, 4751)
    assert thin > 4194304 // CONFIG.factor**2 + 400
    message, _ = start(encoder, max_batch_tokens=1024).receive()
    assert message.memory_bytes >= 3 * CONFIG.factor**2 * thin


def test_device_answers_pings_while_it_loads(start: Start, gate: threading.Event) -> None:
    supervisor = start(load=lambda: gate.wait(60))
    supervisor.tell(Ping())
    assert isinstance(supervisor.receive()[0], Pong)
    supervisor.tell(Scrape())
    message, _ = supervisor.receive()
    assert isinstance(message, Scraped)
    metrics = cast(Sequence[Metric], message.metrics)
    assert "process_resident_memory_bytes" in {metric.name for metric in metrics}
    gate.set()
    assert isinstance(supervisor.receive()[0], DeviceLoaded)


def test_model_that_cannot_be_loaded_is_reported(start: Start) -> None:
    def fail() -> None:
        raise ModelError("there are no weights")

    error = start(load=fail).receive_fault()
    assert isinstance(error, ModelError)
    assert str(error) == "there are no weights"


def test_settings_that_contradict_the_device_are_reported(start: Start) -> None:
    def fail(settings: Settings, name: str) -> Replica:
        raise ModelError("no CUDA device is here")

    error = start(load_replica=fail).receive_fault()
    assert isinstance(error, ModelError)
    assert str(error) == "no CUDA device is here"


def test_missing_memory_is_reported(start: Start) -> None:
    error = start(max_batch_tokens=2**50).receive_fault()
    assert isinstance(error, ModelError)
    assert str(error).startswith("no shared memory for batches: ")


def test_device_with_a_fault_is_lost(start: Start) -> None:
    def fail(items: Sequence[EncodeItem]) -> None:
        raise torch.AcceleratorError("illegal memory access")

    supervisor = start(FakeEncoder(fail))
    supervisor.receive()
    supervisor.send_batch(1)
    assert str(supervisor.receive_loss()) == "device fake is lost: illegal memory access"


def test_device_that_finishes_no_work_is_lost_once(start: Start, gate: threading.Event) -> None:
    def hold(items: Sequence[EncodeItem]) -> None:
        gate.wait(60)

    supervisor = start(FakeEncoder(hold), device_timeout_s=0.2)
    supervisor.receive()
    supervisor.send_batch(0)
    loss = supervisor.receive_loss()
    assert str(loss) == "device fake is lost: it has work and finished nothing for 0.2 s"
    supervisor.tell(Ping())
    assert isinstance(supervisor.receive()[0], Pong)
    gate.set()


class FailingReplica:
    """Its thread ends before its time."""

    name = NAME

    def __init__(self, ready: Future[Any]) -> None:
        self.ready = ready

    def serve(self, queue: Queue) -> Future[None]:
        serving: Future[None] = Future()
        self.ready.add_done_callback(lambda _: serving.set_exception(RuntimeError("no memory")))
        return serving


def test_device_whose_thread_ends_is_lost(start: Start) -> None:
    replica = FailingReplica(fake_ready())
    supervisor = start(load_replica=cast(Any, lambda settings, name: replica))
    found = {type(supervisor.receive()[0]) for _ in range(2)}
    assert found == {DeviceLoaded, Lost}


def fake_ready() -> Future[Any]:
    ready: Future[Any] = Future()
    ready.set_result(FakeEncoder())
    return ready

"""One device in a process of its own: loads the model, and encodes the batches of the API servers.

Devices do not share a process, because a fault of one GPU makes CUDA fail in its whole process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import NoReturn

import uvloop
from prometheus_client import CollectorRegistry, ProcessCollector

from models import DeviceError, ModelError, Replica, VisionEncoder
from service.config.logs import end_process
from service.config.settings import Settings
from service.engine.device_errors import early_end_error, stuck_error
from service.engine.engine import freeze_loaded_objects
from service.engine.replicas import load_replica
from service.processes.device.dispatcher import Dispatcher, ServerLinks
from service.processes.wire.bootstrap import bootstrap
from service.processes.wire.link import Link
from service.processes.wire.memory import SharedMemory
from service.processes.wire.messages import (
    DeviceLoaded,
    DeviceSetup,
    EncoderFacts,
    Fault,
    Lost,
    Scrape,
    Scraped,
)
from service.processes.wire.supervisor_link import SupervisorLink
from service.processes.wire.tallies import SharedIdleness


class DeviceProcess:
    """Reports the state of the device to the supervisor, on an event loop. The device has its own threads."""

    def __init__(
        self,
        setup: DeviceSetup,
        files: Sequence[int],
        supervisor: SupervisorLink,
        load: Callable[[Settings, str], Replica],
    ) -> None:
        idleness, *ends = files
        self._setup = setup
        self._supervisor = supervisor
        self._load = load
        self._idleness = SharedIdleness(SharedMemory(idleness, setup.num_devices), setup.index)
        os.close(idleness)
        self._clients = [ServerLinks(batches, results) for batches, results in Link.pairs_of_files(ends)]
        self._is_lost = False
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)

    async def run(self) -> None:
        """Runs until the process exits. Raises `OSError` if the supervisor cannot be told anything."""
        self._loop = asyncio.get_running_loop()
        self._supervisor.listen(self._on_message)
        dispatcher = Dispatcher(
            self._clients, on_lost=partial(self._from_thread, self._lose), idleness=self._idleness
        )
        try:
            replica = self._load(self._setup.settings, self._setup.device)
        except ModelError as error:
            self._tell(DeviceLoaded(Fault.of(error)))
        else:
            replica.ready.add_done_callback(partial(self._from_thread, self._on_loaded))
            serving = replica.serve(dispatcher)
            serving.add_done_callback(partial(self._from_thread, self._on_served, replica))
        await self._watch(dispatcher, self._setup.settings.device_timeout_s)

    def _from_thread(self, function: Callable[..., None], *args: object) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    def _tell(self, message: object, files: Sequence[int] = ()) -> None:
        with suppress(ConnectionError):  # the supervisor has exited, or has closed the link
            self._supervisor.tell(message, files)

    def _on_message(self, message: object, files: Sequence[int]) -> None:
        assert isinstance(message, Scrape), f"unknown message {message!r}"
        with suppress(OSError):  # the supervisor gives up waiting soon
            self._supervisor.tell(Scraped(list(self._registry.collect())))

    def _on_loaded(self, ready: Future[VisionEncoder]) -> None:
        error = ready.exception()
        if error is None:
            freeze_loaded_objects()
            self._tell_loaded(EncoderFacts.of(ready.result()))
        else:
            self._tell(DeviceLoaded(Fault.of(error)))

    def _tell_loaded(self, encoder: EncoderFacts) -> None:
        """Sends the facts of the encoder, with memory for the patches of a batch for each API server."""
        num_bytes = self._batch_bytes(encoder)
        memories: list[SharedMemory] = []
        try:
            for client in self._clients:
                client.memory = SharedMemory.create(num_bytes)
                memories.append(client.memory)
            self._tell(DeviceLoaded(encoder, num_bytes), [memory.file for memory in memories])
        except OSError as error:
            self._tell(DeviceLoaded(Fault.of(ModelError(f"no shared memory for batches: {error}"))))
        finally:
            for memory in memories:
                memory.close_file()

    def _batch_bytes(self, encoder: EncoderFacts) -> int:
        """Returns the size of the largest batch: a full one, or one large image. Unwritten pages are free."""
        preprocessor = encoder.preprocessor
        num_tokens = max(self._setup.settings.max_batch_tokens, preprocessor.max_num_tokens)
        return 3 * preprocessor.config.factor**2 * num_tokens

    def _on_served(self, replica: Replica, serving: Future[None]) -> None:
        error = early_end_error(replica, serving)
        if error is not None:
            self._lose(error)

    async def _watch(self, dispatcher: Dispatcher, timeout_s: float) -> None:
        while True:
            await asyncio.sleep(min(1.0, timeout_s / 4))
            if dispatcher.is_stuck(timeout_s):
                self._lose(stuck_error(self._setup.device, timeout_s))

    def _lose(self, error: DeviceError) -> None:
        if not self._is_lost:
            self._idleness.retire()
            self._tell(Lost(self._setup.device, Fault.of(error)))
            self._is_lost = True


def main(file: int, load: Callable[[Settings, str], Replica] = load_replica) -> NoReturn:
    """Serves until the supervisor closes the link to it. `file` is that link."""
    setup, files, link = bootstrap(file, DeviceSetup)
    device = DeviceProcess(setup, files, SupervisorLink(link, on_exit=partial(end_process, 0)), load)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(device.run())
    raise AssertionError("a device is watched to the end")

"""A device with its dispatcher, and queues of several API servers before it, all in one process.

Also the process of a device, as a thread of the test.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import uvloop

from models import BatchResult, BatchStats, DeviceError, EncodeItem, Replica, ReplicaGroup
from service.processes.api_server.remote import RemoteReplica
from service.processes.device.device_process import DeviceProcess
from service.processes.device.dispatcher import Dispatcher, ServerLinks
from service.processes.wire.link import Link
from service.processes.wire.memory import SharedMemory
from service.processes.wire.messages import EncoderFacts
from service.processes.wire.supervisor_link import SupervisorLink
from service.queue.batcher import Batcher
from service.queue.queue_records import QueueLimits
from service.queue.ticket import Ticket
from tests.support.app import FakeEncoder, FakeRunning
from tests.support.queueing import Callers, value_of
from tests.support.waiting import eventually

DEVICE = "fake"


class CopyingEncoder(FakeEncoder):
    """Copies the patches at launch, like a real encoder: their memory is reused afterwards."""

    def launch(self, items: Sequence[EncodeItem]) -> FakeRunning:
        return super().launch([copy_of(item) for item in items])


def copy_of(item: EncodeItem) -> EncodeItem:
    return replace(item, patches=replace(item.patches, pixels=item.patches.pixels.clone()))


class ThreadAsProcess:
    """Runs a `DeviceProcess` with a replica of the test."""

    pid = 0

    def __init__(self, line: Link, group: ReplicaGroup, is_deaf: bool) -> None:
        """`is_deaf`: it does not end when the link is closed."""
        self._line = Link.of_file(os.dup(line.fileno()))  # the supervisor closes its own
        self._replicas = {replica.name: replica for replica in group.replicas}
        self._is_deaf = is_deaf
        self.hangs = False
        self._hung = threading.Event()
        self._ended = threading.Event()
        self._code = 0
        self._closed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def wait(self) -> int:
        self._ended.wait()
        return self._code

    def kill(self) -> None:
        if not self.hangs:
            self._code = -signal.SIGKILL
            self._end()

    def hang(self) -> None:
        """Hangs like a driver, where no signal has an effect, until the test ends it."""
        self.hangs = True
        self._loop.call_soon_threadsafe(self._hung.wait)

    def end(self) -> None:
        """Ends it even if it hangs."""
        self._hung.set()
        self._end()

    def close(self) -> None:
        """To be called once the replicas are closed: their threads may send messages until then."""
        self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()

    def _run(self) -> None:
        setup, files = self._line.receive()
        line = SupervisorLink(self._line, on_exit=self._on_exit)
        device = DeviceProcess(setup, files, line, lambda settings, name: self._replicas[name])
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve(device))

    async def _serve(self, device: DeviceProcess) -> None:
        self._loop = asyncio.get_running_loop()
        self._running = asyncio.ensure_future(device.run())
        with suppress(asyncio.CancelledError):
            await self._running
        for client in device._clients:  # as the end of the process would; the replica's thread still has them
            for link in (client.batches, client.results):
                link.socket.shutdown(socket.SHUT_RDWR)
        self._line.close()
        self._ended.set()
        await self._closed.wait()

    def _on_exit(self) -> None:
        if not self._is_deaf:
            self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._running.cancel)


class ApiServer:
    """The queue of one API server, and its ends of the links to the device."""

    def __init__(
        self, callers: Callers, replica: RemoteReplica, memory: SharedMemory, limits: QueueLimits
    ) -> None:
        self._callers = callers
        self.replica = replica
        self.lost: list[DeviceError] = []
        self.observed: list[BatchStats] = []
        self.batcher = Batcher(limits, observe=self.observed.append, on_lost=self.lost.append)
        self.serving = replica.serve(self.batcher.add_device(replica.name))
        self.serving.add_done_callback(self._on_served)
        replica.loaded(EncoderFacts.of(cast(Any, FakeEncoder())), memory)

    def _on_served(self, serving: Future[None]) -> None:
        """Loses the device, like the engine."""
        error = serving.exception()
        if error is not None:
            self.batcher.lose(DEVICE, DeviceError(DEVICE, error))

    def put(self, *images: EncodeItem) -> Ticket:
        return self._callers.put(self.batcher, *images)

    def outcome(self, ticket: Ticket) -> Sequence[torch.Tensor]:
        return self._callers.outcome(ticket)

    def error(self, ticket: Ticket) -> Exception:
        return self._callers.error(ticket)


class TakenBatch:
    """A batch that the device has taken, until the test finishes it."""

    def __init__(self, items: Sequence[EncodeItem], future: Future[BatchResult]) -> None:
        self.values = [value_of(item) for item in items]
        self.items = [copy_of(item) for item in items]
        self.future = future

    def finish(self, *embeddings: torch.Tensor) -> None:
        """Finishes with these embeddings, or with the values of the images."""
        found = embeddings or tuple(torch.tensor([float(value)]) for value in self.values)
        stats = BatchStats(DEVICE, len(self.items), len(self.items), 0, {}, {}, 0, 0.1)
        self.future.set_result(BatchResult(found, (stats,), 1.0, 2.0))


class FakeIdleness:
    """The idleness of one device, with as many idle others as the test sets."""

    def __init__(self) -> None:
        self.is_idle = False
        self.num_others = 0

    def set(self, is_idle: bool) -> None:
        self.is_idle = is_idle

    def count_others(self) -> int:
        return self.num_others


class Company:
    """API servers and the device that they share."""

    def __init__(
        self,
        callers: Callers,
        *,
        num_servers: int = 2,
        max_batch_tokens: int = 10,
        memory_bytes: int = 2**20,
        strangers: Sequence[ServerLinks] = (),  # further API servers, which the test plays
    ) -> None:
        limits = QueueLimits(max_batch_tokens, 10_000)
        self.clients: list[ServerLinks] = []
        self.servers: list[ApiServer] = []
        for _ in range(num_servers):
            (batches, their_batches), (results, their_results) = Link.pair(), Link.pair()
            memory = SharedMemory.create(memory_bytes)
            self.clients.append(ServerLinks(batches, results, memory))
            replica = RemoteReplica(DEVICE, their_batches, their_results)
            self.servers.append(ApiServer(callers, replica, memory, limits))
        self.clients += strangers
        self.lost: list[DeviceError] = []
        self.idleness = FakeIdleness()
        self.dispatcher = Dispatcher(self.clients, on_lost=self.lost.append, idleness=self.idleness)
        self.threads = ThreadPoolExecutor(1)
        self._replica: Replica | None = None

    def serve(self, encoder: FakeEncoder) -> None:
        """Runs all batches with an encoder."""
        self._replica = Replica(DEVICE, partial(cast(Any, lambda: encoder)))
        self._replica.serve(self.dispatcher)

    def take(self) -> TakenBatch:
        """Takes the next batch, in another thread, so that the test cannot hang."""
        taken = self.threads.submit(self.dispatcher.take).result(10)
        assert taken is not None, "no API server is left"
        return TakenBatch(*taken)

    def wait_until_wanting(self, number: int) -> None:
        """Waits until `number` API servers have said that images wait."""

        def num_wanting() -> int:
            links = [client.batches.socket for client in self.clients if client.batches.fileno() >= 0]
            return len(self.dispatcher._wanting) + len(select.select(links, [], [], 0)[0])

        eventually(lambda: num_wanting() == number)

    def end_device(self) -> None:
        """Closes the links, like the exit of its process."""
        for client in self.clients:
            client.batches.close()
            client.results.close()

    def close(self) -> None:
        for server in self.servers:
            server.batcher.close()
            server.replica.close()
        if self._replica is not None:
            self._replica.close()
        self.threads.shutdown()
        self.end_device()
        for client in self.clients:
            if client.memory is not None:
                client.memory.close_file()

"""One API server: the whole app, in a process of its own. Connections and devices are those of others.

Knows the orders of the supervisor; nothing of the other API servers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn, cast

import torch
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Metric

from service.app import SharedProcessState, create_app
from service.config.files import max_connections
from service.config.logs import end_process
from service.config.settings import Settings
from service.engine.engine import Engine, freeze_loaded_objects
from service.processes.api_server.gathering import Gathering
from service.processes.api_server.remote import RemoteReplica, RemoteReplicas
from service.processes.wire.bootstrap import join
from service.processes.wire.line import Line
from service.processes.wire.link import Link
from service.processes.wire.memory import SharedMemory
from service.processes.wire.messages import (
    DeviceLoaded,
    Farewell,
    Fault,
    Full,
    Leaving,
    Loaded,
    Lost,
    Scrape,
    Scraped,
    Setup,
    Stop,
    Up,
)
from service.processes.wire.tallies import shared_tallies
from service.server import Server, finish, trust_own_limits

logger = logging.getLogger(__name__)

_TAKEN_AT_ONCE = 64
_FULL_PAUSE_S = 0.05  # for a server with as many connections as it may have
_HAND_OVER_S = 2.0  # for connections that are on their way to a server that leaves
# What they say is the same in all API servers. The first one says it.
_SPOKEN_BY_FIRST = ("service.app", "service.engine.engine")


class ApiServer(Server):
    """A server that is given its connections, and its orders, by the supervisor."""

    def __init__(
        self,
        app: FastAPI,
        settings: Settings,
        line: Line,
        gathering: Gathering,
        connections: Link,
        replicas: RemoteReplicas,
        own_metrics: Callable[[], list[Metric]],
        *,
        logs_lifecycle: bool,
    ) -> None:
        super().__init__(app, settings, logs_lifecycle=logs_lifecycle)
        self._line = line
        self._gathering = gathering
        self._connections = connections
        self._replicas = {replica.name: replica for replica in replicas.replicas}
        self._own_metrics = own_metrics
        self._no_more_connections = asyncio.Event()
        self._opening: set[asyncio.Task[None]] = set()
        self._max_connections = max_connections()
        self._is_full = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to all processes of a group. What a second one means is up to the supervisor."""
        self._told_to_stop = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """In place of uvicorn's, which listens."""
        self.servers: list[asyncio.Server] = []
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(1)  # which it has logged
        self._connections.socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._connections.fileno(), self._take_connections)
        self._line.listen(self._obey)
        # As after loading, and now, so that all are ready at the same time.
        freeze_loaded_objects()
        self._line.tell(Up())
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """First lets the supervisor know, so that no connection is lost on its way here."""
        self._line.tell(Leaving())
        self._max_connections = sys.maxsize  # those on their way are told to leave, too
        try:
            async with asyncio.timeout(_HAND_OVER_S):
                await self._no_more_connections.wait()
        except TimeoutError:
            logger.warning("the supervisor still hands out connections")
        if self._opening:
            await asyncio.wait(self._opening)
        await super().shutdown(sockets)
        with suppress(OSError):  # the process has no file for them
            self._line.tell(Farewell(self._own_metrics()))

    def _obey(self, message: object, files: Sequence[int]) -> None:
        match message:
            case Loaded(devices):
                self._on_loaded(devices, files)
            case Lost(device, fault):
                self._engine.batcher.lose(device, fault.device_error())
            case Scrape():
                self._tell_metrics()
            case Scraped(metrics):
                self._gathering.answered(metrics)
            case Stop():
                self._told_to_stop = True
            case _:
                raise AssertionError(f"unknown order {message!r}")

    def _on_loaded(self, devices: Mapping[str, DeviceLoaded], files: Sequence[int]) -> None:
        rest = iter(files)
        for device, loaded in devices.items():
            if isinstance(loaded.encoder, Fault):
                self._replicas[device].ready.set_exception(loaded.encoder.error())
            else:
                memory = SharedMemory(next(rest), loaded.memory_bytes)
                memory.close_file()
                self._replicas[device].loaded(loaded.encoder, memory)

    def _tell_metrics(self) -> None:
        try:
            self._line.tell(Scraped(self._own_metrics()))
        except OSError:  # the process has no file for them
            self._line.tell(Scraped(None))

    def _take_connections(self) -> None:
        """As many as there are files for. The others go back, for another API server to have them."""
        try:
            for _ in range(_TAKEN_AT_ONCE):
                _, files = self._connections.receive()
                if not files:
                    logger.error("a connection is lost, as the process has no file for it")
                elif self._num_connections < self._max_connections:
                    self._open(socket.socket(fileno=files[0]))
                else:
                    self._send_back(files[0])
        except BlockingIOError:
            return
        except EOFError:
            asyncio.get_running_loop().remove_reader(self._connections.fileno())
            self._no_more_connections.set()

    def _send_back(self, connection: int) -> None:
        try:
            self._line.tell(Full(True), [connection])
        finally:
            os.close(connection)
        if not self._is_full:
            self._is_full = True
            self._look_for_room()

    def _look_for_room(self) -> None:
        if self._num_connections >= self._max_connections:
            asyncio.get_running_loop().call_later(_FULL_PAUSE_S, self._look_for_room)
        else:
            self._is_full = False
            self._line.tell(Full(False))

    @property
    def _num_connections(self) -> int:
        return len(self.server_state.connections) + len(self._opening)

    def _open(self, connection: socket.socket) -> None:
        opening = asyncio.get_running_loop().create_task(self._connect(connection))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(self._make_protocol, connection)
        except OSError:
            connection.close()  # the client is gone

    def _make_protocol(self) -> asyncio.Protocol:
        protocol = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        return protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


def main(file: int) -> NoReturn:
    """Serves until the supervisor says that it is enough. The line to it is in that file."""
    setup, files, link = join(file, Setup)
    settings = setup.settings
    if setup.index:
        for name in _SPOKEN_BY_FIRST:
            logging.getLogger(name).disabled = True
    trust_own_limits()
    torch.set_num_threads(1)  # each image is resized in a thread of its own
    connections, tallies, *rest = files
    line = Line(link, on_gone=_end)
    gathering = Gathering(line.tell)
    registry = CollectorRegistry()
    replicas = _replicas(setup, rest)
    reserved_tokens, held_bytes = shared_tallies(tallies, setup.index, setup.num_servers)
    app = create_app(
        settings,
        registry=registry,
        start_replicas=lambda settings: replicas,
        shared=SharedProcessState(
            reserved_tokens,
            held_bytes,
            gathering.gather,
            setup.started_at,
            num_servers=setup.num_servers,
            owns_devices=False,
        ),
    )
    server = ApiServer(
        app,
        settings,
        line,
        gathering,
        Link.of_file(connections),
        replicas,
        lambda: list(registry.collect()),
        logs_lifecycle=setup.index == 0,
    )
    server.run()
    engine: Engine = app.state.engine
    finish(engine)


def _end() -> NoReturn:
    logger.critical("the supervisor has ended, and so does this API server")
    end_process(1)


def _replicas(setup: Setup, files: Sequence[int]) -> RemoteReplicas:
    """Of two files for each device."""
    pairs = zip(setup.devices, Link.pairs_of_files(files), strict=True)
    return RemoteReplicas([RemoteReplica(device, batches, results) for device, (batches, results) in pairs])

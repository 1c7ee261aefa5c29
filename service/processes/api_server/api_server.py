"""One API server: the whole app in a process of its own. Its devices are in other processes.

Knows the messages of the supervisor; knows nothing of the other API servers.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import torch
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Metric

from service.app import SharedProcessState, create_app
from service.config.logs import end_process
from service.config.settings import Settings
from service.engine.engine import Engine, freeze_loaded_objects
from service.http.acceptor import ConnectionCounts
from service.processes.api_server.remote import RemoteReplica, RemoteReplicas
from service.processes.api_server.scrape_client import ScrapeClient
from service.processes.wire.bootstrap import bootstrap
from service.processes.wire.link import Link
from service.processes.wire.memory import SharedMemory
from service.processes.wire.messages import (
    DeviceLoaded,
    Farewell,
    Fault,
    Gathered,
    Loaded,
    Lost,
    Scrape,
    Scraped,
    Setup,
    Stop,
    Up,
)
from service.processes.wire.supervisor_link import SupervisorLink
from service.processes.wire.tallies import SharedTallies
from service.server import Server, finish, trust_own_limits

logger = logging.getLogger(__name__)

# These loggers say the same in all API servers, so only the first one logs it.
_LOGGED_BY_FIRST = ("service.app", "service.engine.engine")


class ApiServer(Server):
    """A server that takes orders from the supervisor, and shares its listener with other API servers."""

    def __init__(
        self,
        app: FastAPI,
        settings: Settings,
        supervisor: SupervisorLink,
        scrapes: ScrapeClient,
        connections: ConnectionCounts,
        replicas: RemoteReplicas,
        own_metrics: Callable[[], list[Metric]],
        *,
        logs_lifecycle: bool,
    ) -> None:
        super().__init__(app, settings, logs_lifecycle=logs_lifecycle, connections=connections)
        self._supervisor = supervisor
        self._scrapes = scrapes
        self._replicas = {replica.name: replica for replica in replicas.replicas}
        self._own_metrics = own_metrics

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drains after a signal to the whole process group. The supervisor handles a second signal."""
        self._told_to_stop = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the server, and tells the supervisor."""
        await super().startup(sockets)
        self._supervisor.listen(self._on_message)
        # As after loading, and now, so that all are ready at the same time.
        freeze_loaded_objects()
        self._supervisor.tell(Up())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the server, and sends its last metrics to the supervisor."""
        await super().shutdown(sockets)
        with suppress(OSError):  # no file is left for the message
            self._supervisor.tell(Farewell(self._own_metrics()))

    def _on_message(self, message: object, files: Sequence[int]) -> None:
        match message:
            case Loaded(devices):
                self._on_loaded(devices, files)
            case Lost(device, fault):
                self._engine.batcher.lose(device, fault.device_error())
            case Scrape():
                self._tell_metrics()
            case Gathered(numbers, metrics):
                self._scrapes.on_gathered(numbers, metrics)
            case Stop():
                self._told_to_stop = True
            case _:
                raise AssertionError(f"unknown message {message!r}")

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
            self._supervisor.tell(Scraped(self._own_metrics()))
        except OSError:  # no file is left for the message
            self._supervisor.tell(Scraped(None))


def main(file: int) -> NoReturn:
    """Serves until the supervisor says `Stop`. `file` is the link to the supervisor."""
    setup, files, link = bootstrap(file, Setup)
    settings = setup.settings
    if setup.index:
        for name in _LOGGED_BY_FIRST:
            logging.getLogger(name).disabled = True
    trust_own_limits()
    torch.set_num_threads(1)  # each image is resized in a thread of its own
    listener, tallies, *rest = files
    to_supervisor = SupervisorLink(link, on_exit=_end)
    scrapes = ScrapeClient(to_supervisor.tell)
    registry = CollectorRegistry()
    replicas = _replicas(setup, rest)
    shared = SharedTallies.of_file(tallies, setup.index, setup.num_servers)
    app = create_app(
        settings,
        registry=registry,
        start_replicas=lambda settings: replicas,
        shared=SharedProcessState(
            shared.reserved_tokens,
            shared.held_bytes,
            scrapes.gather,
            setup.started_at,
            num_servers=setup.num_servers,
            is_first=setup.index == 0,
            owns_devices=False,
        ),
    )
    server = ApiServer(
        app,
        settings,
        to_supervisor,
        scrapes,
        shared.connections,
        replicas,
        lambda: list(registry.collect()),
        logs_lifecycle=setup.index == 0,
    )
    server.run([socket.socket(fileno=listener)])
    engine: Engine = app.state.engine
    finish(engine)


def _end() -> NoReturn:
    logger.critical("the supervisor has ended, and so does this API server")
    end_process(1)


def _replicas(setup: Setup, files: Sequence[int]) -> RemoteReplicas:
    """Replicas from two files for each device: the links for batches and for results."""
    pairs = zip(setup.devices, Link.pairs_of_files(files), strict=True)
    return RemoteReplicas([RemoteReplica(device, batches, results) for device, (batches, results) in pairs])

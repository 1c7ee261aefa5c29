"""An API server in a thread of this process, with the test in the place of the supervisor."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from service.__main__ import listen
from service.app import create_app
from service.config.settings import Settings
from service.http.acceptor import OwnCount
from service.processes.api_server.api_server import ApiServer
from service.processes.api_server.remote import RemoteReplicas
from service.processes.api_server.scrape_client import ScrapeClient
from service.processes.wire.link import Link
from service.processes.wire.messages import Farewell, Stop, Up
from service.processes.wire.supervisor_link import SupervisorLink
from tests.support.app import FakeEncoder, fake_replicas
from tests.support.waiting import eventually


class Supervised:
    """The server; `heard` returns its next message."""

    def __init__(self, settings: Settings) -> None:
        self._line, line = Link.pair()
        self._line.socket.settimeout(20)
        listener = listen("127.0.0.1", 0)
        self.address = listener.getsockname()
        self._clients: list[socket.socket] = []
        registry = CollectorRegistry()
        app = create_app(
            settings, registry=registry, start_replicas=lambda settings: fake_replicas(FakeEncoder())
        )
        its_line = SupervisorLink(line, on_exit=lambda: None)
        self.server = ApiServer(
            app,
            settings,
            its_line,
            ScrapeClient(its_line.tell),
            OwnCount(),
            RemoteReplicas([]),
            lambda: list(registry.collect()),
            logs_lifecycle=False,
        )
        self._its_end = line
        self._thread = threading.Thread(target=self.server.run, args=([listener],))
        self._thread.start()
        assert self.heard() == Up()

    def heard(self) -> object:
        message, files = self._line.receive()
        for file in files:
            os.close(file)
        return message

    def connect(self) -> socket.socket:
        client = socket.create_connection(self.address, timeout=20)
        self._clients.append(client)
        return client

    @property
    def has(self) -> int:
        """Connections."""
        return len(self.server.server_state.connections)

    def stop(self) -> None:
        self._line.send(Stop())

    def has_ended(self) -> bool:
        self._thread.join(20)
        return not self._thread.is_alive()

    def close(self) -> None:
        self.server.handle_exit(15, None)
        assert self.has_ended()
        for client in self._clients:
            client.close()
        for link in (self._line, self._its_end):
            link.close()
        gc.unfreeze()  # what was loaded


@pytest.fixture
def supervised(settings: Settings) -> Iterator[Supervised]:
    running = Supervised(settings)
    yield running
    running.close()


def test_server_that_stops_sends_its_last_metrics_once_its_connections_are_closed(
    supervised: Supervised,
) -> None:
    client = supervised.connect()
    eventually(lambda: supervised.has == 1)
    supervised.stop()
    assert client.recv(1) == b""
    assert isinstance(supervised.heard(), Farewell)
    assert supervised.has_ended()
    assert supervised.has == 0

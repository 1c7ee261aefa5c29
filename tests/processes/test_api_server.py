"""An API server in a thread of this process, with the test in the place of the supervisor."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import CollectorRegistry

from service.__main__ import listen
from service.app import create_app
from service.config.settings import Settings
from service.processes.api_server.api_server import ApiServer
from service.processes.api_server.gathering import Gathering
from service.processes.api_server.remote import RemoteReplicas
from service.processes.wire.line import Line
from service.processes.wire.link import Link
from service.processes.wire.messages import Farewell, Full, Leaving, Stop, Up
from tests.support.app import FakeEncoder, fake_replicas
from tests.support.waiting import eventually


class Supervised:
    """The server; `heard` gives what it says. It may have `max_connections` connections."""

    def __init__(self, settings: Settings, max_connections: int) -> None:
        self._line, line = Link.pair()
        self._line.socket.settimeout(20)
        self._connections, connections = Link.pair()
        self._listener = listen("127.0.0.1", 0)
        self._clients: list[socket.socket] = []
        registry = CollectorRegistry()
        app = create_app(
            settings, registry=registry, start_replicas=lambda settings: fake_replicas(FakeEncoder())
        )
        its_line = Line(line, on_gone=lambda: None)
        self.server = ApiServer(
            app,
            settings,
            its_line,
            Gathering(its_line.tell),
            connections,
            RemoteReplicas([]),
            lambda: list(registry.collect()),
            logs_lifecycle=False,
        )
        self.server._max_connections = max_connections
        self._ends = (line, connections)
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()
        assert self.heard() == Up()

    def heard(self) -> object:
        message, files = self._line.receive()
        for file in files:
            os.close(file)
        return message

    def connect(self) -> socket.socket:
        """A client whose connection was handed to the server."""
        client = socket.create_connection(self._listener.getsockname(), timeout=20)
        self._clients.append(client)
        self.hand_over()
        return client

    def hand_over(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            self._connections.send(None, [connection.fileno()])

    @property
    def has(self) -> int:
        """Connections."""
        return len(self.server.server_state.connections)

    def stop(self) -> None:
        self._line.send(Stop())

    def stop_connections(self) -> None:
        self._connections.close()

    def has_ended(self) -> bool:
        self._thread.join(20)
        return not self._thread.is_alive()

    def close(self) -> None:
        self.server.handle_exit(15, None)
        self.stop_connections()
        assert self.has_ended()
        for client in (*self._clients, self._listener):
            client.close()
        for link in (self._line, *self._ends):
            link.close()
        gc.unfreeze()  # what was loaded


Start = Callable[[int], Supervised]


@pytest.fixture
def start(settings: Settings) -> Iterator[Start]:
    running: list[Supervised] = []

    def start_server(max_connections: int) -> Supervised:
        running.append(Supervised(settings, max_connections))
        return running[-1]

    yield start_server
    for server in running:
        server.close()


def test_connections_over_the_limit_go_back_and_it_says_when_there_is_room_again(start: Start) -> None:
    supervised = start(1)
    for _ in range(2):
        client = supervised.connect()
        eventually(lambda: supervised.has == 1)
        for _ in range(2):
            supervised.connect()
            assert supervised.heard() == Full(True)
        assert supervised.has == 1
        client.close()
        assert supervised.heard() == Full(False)


def test_a_full_server_that_leaves_sends_none_back_that_was_on_its_way(start: Start) -> None:
    """They may come after the others have left, when nobody would have them."""
    supervised = start(1)
    staying = supervised.connect()
    eventually(lambda: supervised.has == 1)
    supervised.stop()
    assert supervised.heard() == Leaving()
    late = supervised.connect()
    eventually(lambda: supervised.has == 2)
    supervised.stop_connections()
    assert isinstance(supervised.heard(), Farewell)
    assert supervised.has_ended()
    assert [client.recv(1) for client in (staying, late)] == [b"", b""]

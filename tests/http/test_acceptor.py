"""Several acceptors on one listening socket, as several processes have them."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from service.__main__ import listen
from service.http import acceptor
from service.http.acceptor import Acceptor, ConnectionCounts, OwnCount, ignore_new_clients
from service.processes.wire import tallies
from service.processes.wire.tallies import SharedTallies, tallies_memory


class Server:
    """Answers each connection with its name, and keeps it until the client closes it."""

    def __init__(
        self, listener: socket.socket, name: bytes, counts: ConnectionCounts, max_connections: int = 1000
    ) -> None:
        self._name = name
        self.open: set[asyncio.Transport] = set()
        self.acceptor = Acceptor(listener, self._greet, lambda: len(self.open), counts, max_connections)

    def _greet(self) -> asyncio.Protocol:
        server = self

        class Greeting(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                assert isinstance(transport, asyncio.Transport)
                self.transport = transport
                server.open.add(transport)
                transport.write(server._name)

            def connection_lost(self, exc: Exception | None) -> None:
                server.open.discard(self.transport)

        return Greeting()


class Shared:
    """A listening socket that several servers share, and the clients of it."""

    def __init__(self, listener: socket.socket, num_processes: int) -> None:
        self.listener = listener
        self.address = listener.getsockname()
        memory = tallies_memory(num_processes)
        self.counts = [
            SharedTallies.of(memory, process, num_processes).connections for process in range(num_processes)
        ]
        memory.close_file()
        self._clients: list[socket.socket] = []

    def serve(self, *, max_connections: int = 1000) -> list[Server]:
        """One server for each process."""
        return [
            self.start(counts, b"abcd"[n : n + 1], max_connections) for n, counts in enumerate(self.counts)
        ]

    def start(self, counts: ConnectionCounts, name: bytes = b"a", max_connections: int = 1000) -> Server:
        return Server(self.listener.dup(), name, counts, max_connections)

    async def connect(self) -> socket.socket:
        client = socket.socket()
        client.setblocking(False)
        self._clients.append(client)
        await asyncio.get_running_loop().sock_connect(client, self.address)
        return client

    async def name(self) -> bytes:
        """The name of the server that accepts a new connection, which stays open."""
        return await answer(await self.connect())

    def close(self) -> None:
        for client in self._clients:
            client.close()


async def answer(client: socket.socket) -> bytes:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 10), 5)


Run = Callable[[Callable[[Shared], Coroutine[Any, Any, None]], int], None]


@pytest.fixture
def run() -> Run:
    async def run_in(shared: Shared, scenario: Callable[[Shared], Coroutine[Any, Any, None]]) -> None:
        await scenario(shared)
        shared.close()
        await asyncio.sleep(0.01)  # the servers see it

    def run(scenario: Callable[[Shared], Coroutine[Any, Any, None]], num_processes: int) -> None:
        with asyncio.Runner() as runner, listen("127.0.0.1", 0) as listener:
            runner.run(run_in(Shared(listener, num_processes), scenario))

    return run


async def stop(*servers: Server) -> None:
    for server in servers:
        await server.acceptor.stop()


@pytest.mark.parametrize("num_servers", [1, 2, 4])
@pytest.mark.parametrize("is_at_once", [True, False])
def test_connections_are_shared_equally(run: Run, num_servers: int, is_at_once: bool) -> None:
    async def scenario(shared: Shared) -> None:
        servers = shared.serve()
        if is_at_once:
            names = await asyncio.gather(*(shared.name() for _ in range(16)))
        else:
            names = [await shared.name() for _ in range(16)]
        assert sorted(names) == sorted([b"a", b"b", b"c", b"d"][:num_servers] * (16 // num_servers))
        await stop(*servers)

    run(scenario, num_servers)


def test_server_whose_connections_close_gets_the_next_ones(run: Run) -> None:
    async def scenario(shared: Shared) -> None:
        servers = shared.serve()
        clients = [await shared.connect() for _ in range(8)]
        names = [await answer(client) for client in clients]
        for client, name in zip(clients, names, strict=True):
            if name == b"a":
                client.close()
        await asyncio.sleep(0.01)
        again = [await shared.name() for _ in range(5)]
        assert again.count(b"a") >= 4  # the first may go to the other server, which cannot know yet
        await stop(*servers)

    run(scenario, 2)


def test_busy_server_with_fewer_connections_is_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "_PATIENCE_S", 0.2)

    async def scenario(shared: Shared) -> None:
        loop = asyncio.get_running_loop()
        server = shared.start(shared.counts[0])
        await shared.name()
        shared.counts[1].own = 0  # the other process is there, and accepts nothing
        started_at = loop.time()
        await shared.name()
        assert loop.time() - started_at > 0.15
        started_at = loop.time()
        waiting = asyncio.ensure_future(shared.name())
        await asyncio.sleep(0.01)
        shared.counts[1].leave()
        await waiting
        assert loop.time() - started_at < 0.15
        await stop(server)

    run(scenario, 2)


def test_server_that_has_not_started_or_is_stuck_is_not_waited_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "_PATIENCE_S", 60)

    async def scenario(shared: Shared) -> None:
        server = shared.start(shared.counts[0])
        assert [await shared.name() for _ in range(5)] == [b"a"] * 5
        shared.counts[1].own = 0
        monkeypatch.setattr(tallies, "_STUCK_MS", -1)
        assert [await shared.name() for _ in range(5)] == [b"a"] * 5
        await stop(server)

    run(scenario, 2)


def test_full_server_leaves_connections_waiting_until_it_has_room(run: Run) -> None:
    async def scenario(shared: Shared) -> None:
        server = shared.start(OwnCount(), max_connections=2)
        clients = [await shared.connect() for _ in range(2)]
        for client in clients:
            await answer(client)
        late = await shared.connect()
        waiting = asyncio.ensure_future(answer(late))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert len(server.open) == 2
        clients[0].close()
        assert await waiting == b"a"
        await stop(server)

    run(scenario, 1)


def test_server_without_a_free_file_tries_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "_NO_FILES_PAUSE_S", 0.01)

    class Listener(socket.socket):
        num_failures = 3

        def accept(self) -> tuple[socket.socket, Any]:
            if self.num_failures:
                self.num_failures -= 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().accept()

    async def scenario(shared: Shared) -> None:
        server = Server(Listener(fileno=os.dup(shared.listener.fileno())), b"a", OwnCount())
        assert await shared.name() == b"a"
        await stop(server)

    run(scenario, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "cannot accept connections: Too many open files"
    ] * 3


def test_last_server_that_stops_accepts_all_that_wait(run: Run) -> None:
    async def scenario(shared: Shared) -> None:
        server = shared.start(OwnCount(), max_connections=0)
        clients = [await shared.connect() for _ in range(100)]
        shared.listener.close()
        await stop(server)
        assert [await answer(client) for client in clients] == [b"a"] * 100
        with pytest.raises(ConnectionRefusedError):
            await shared.connect()

    run(scenario, 1)


def test_server_that_stops_before_others_leaves_waiting_connections_to_them(run: Run) -> None:
    async def scenario(shared: Shared) -> None:
        first, second = shared.serve(max_connections=0)
        clients = [await shared.connect() for _ in range(3)]
        await stop(first)
        assert not first.open
        assert shared.counts[1].others == []
        await stop(second)
        assert [await answer(client) for client in clients] == [b"b"] * 3

    run(scenario, 2)


def test_servers_that_stop_at_once_accept_all_that_wait(run: Run) -> None:
    async def scenario(shared: Shared) -> None:
        servers = shared.serve(max_connections=0)
        clients = [await shared.connect() for _ in range(10)]
        await asyncio.gather(*(server.acceptor.stop() for server in servers))
        assert {await answer(client) for client in clients} <= {b"a", b"b"}

    run(scenario, 2)


def test_clients_are_ignored_and_open_connections_go_on(run: Run) -> None:
    async def scenario(shared: Shared) -> None:
        loop = asyncio.get_running_loop()
        early = await shared.connect()
        ignore_new_clients(shared.listener)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(shared.connect(), 0.2)
        connection, _ = shared.listener.accept()
        with connection:
            connection.sendall(b"hello")
            assert await answer(early) == b"hello"
            await loop.sock_sendall(early, b"bye")
            assert connection.recv(10) == b"bye"

    run(scenario, 1)

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, cast

import pytest

from service.__main__ import listen
from service.processes.supervisor.members import ServerMember
from service.processes.supervisor.reception import Reception
from service.processes.wire.link import Link


class FakeMember:
    """Answers each connection with its name, as long as it has room."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.room = 1000
        self.takes_connections = True
        self.is_full = False
        self.is_responsive = True

    def hand_over(self, connection: socket.socket) -> bool:
        if not (self.takes_connections and self.room):
            return False
        self.room -= 1
        connection.send(self.name)
        return True


async def connect(listener: socket.socket, number: int) -> bytes:
    """The names of those that so many connections came to."""
    return b"".join([await answer(await opened(listener)) for _ in range(number)])


async def opened(listener: socket.socket) -> socket.socket:
    client = socket.socket()
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, listener.getsockname())
    return client


async def answer(client: socket.socket) -> bytes:
    with client:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 10), 5)


Run = Callable[[Callable[[socket.socket], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner, listen("127.0.0.1", 0) as listener:
        yield lambda scenario: runner.run(scenario(listener))


def receive(listener: socket.socket, members: Sequence[FakeMember]) -> Reception:
    return Reception(listener, cast(Sequence[ServerMember], members))


def test_connections_are_handed_out_in_turn(run: Run) -> None:
    async def scenario(listener: socket.socket) -> None:
        receive(listener, [FakeMember(b"a"), FakeMember(b"b"), FakeMember(b"c")])
        assert await connect(listener, 7) == b"abcabca"

    run(scenario)


def test_one_that_does_not_answer_or_has_no_room_is_passed_over(run: Run) -> None:
    async def scenario(listener: socket.socket) -> None:
        members = [FakeMember(b"a"), FakeMember(b"b"), FakeMember(b"c")]
        members[1].is_responsive = False
        receive(listener, members)
        assert await connect(listener, 4) == b"acac"
        members[0].room = 0
        members[2].takes_connections = False
        assert await connect(listener, 2) == b"bb"  # it may come back, and the others will not take them

    run(scenario)


def test_connections_wait_until_there_is_room(run: Run) -> None:
    async def scenario(listener: socket.socket) -> None:
        member = FakeMember(b"a")
        member.room = 0
        receive(listener, [member])
        clients = [await opened(listener) for _ in range(3)]
        waiting = [asyncio.ensure_future(answer(client)) for client in clients]
        await asyncio.sleep(0.1)
        assert not any(one.done() for one in waiting)
        member.room = 10
        assert await asyncio.gather(*waiting) == [b"a"] * 3

    run(scenario)


def test_a_connection_that_comes_back_is_handed_to_another(run: Run) -> None:
    async def scenario(listener: socket.socket) -> None:
        members = [FakeMember(b"a"), FakeMember(b"b")]
        reception = receive(listener, members)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        members[0].room = members[1].room = 0
        reception.take_back(theirs)
        waiting = asyncio.ensure_future(answer(ours))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        members[1].room = 10
        assert await waiting == b"b"
        assert await connect(listener, 1) == b"b"

    run(scenario)


def test_one_that_is_full_or_leaves_is_handed_no_connection() -> None:
    (line, their_line), (connections, theirs) = Link.pair(), Link.pair()
    member = ServerMember(
        name="API server 0",
        process=cast(Any, None),
        line=line,
        index=0,
        connections=connections,
        device_ends={},
    )
    with socket.socket() as connection:
        assert member.hand_over(connection)
        member.is_full = True
        assert not member.hand_over(connection)
        member.is_full = False
        assert member.hand_over(connection)
        member.stop_connections()
        assert not member.hand_over(connection)
    for _ in range(2):
        _, [file] = theirs.receive()
        os.close(file)
    with pytest.raises(EOFError):
        theirs.receive()
    for link in (line, their_line, theirs):
        link.socket.close()


def test_it_closes_once_none_takes_connections(run: Run) -> None:
    async def scenario(listener: socket.socket) -> None:
        members = [FakeMember(b"a"), FakeMember(b"b")]
        reception = receive(listener, members)
        address = listener.getsockname()
        members[0].takes_connections = False
        reception.close_if_alone()
        assert await connect(listener, 1) == b"b"
        members[1].takes_connections = False
        members[1].room = 0
        reception.close_if_alone()
        reception.close_if_alone()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)

    run(scenario)

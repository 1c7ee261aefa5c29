"""How connections end: slow readers, shutdown, upgrades, idle connections."""

from __future__ import annotations

import asyncio
import socket

import pytest

from service.http import http_protocol, transport
from tests.support.http_server import BIG, GET, POST, Server, run


@pytest.mark.parametrize("end", [b"", b"connection: close\r\n"])
@pytest.mark.parametrize("path", [b"/big", b"/pieces"])
def test_unread_answer_is_cut_off(path: bytes, end: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect_slow_reader()
        await connection.send(GET.replace(b"/", path, 1) + end + b"\r\n")
        assert (await connection.head())[0] == 200
        await asyncio.sleep(0.1)
        await connection.read(2**18)
        await server.wait_until_unconnected()
        if path == b"/pieces":
            await asyncio.wait_for(server.app.left.wait(), 5)
        assert not server.state.tasks

    run(talk, unread_timeout_s=0.3)
    assert caplog.text == ""


def test_closing_connection_with_few_unread_bytes_is_cut_off() -> None:
    async def talk(server: Server) -> None:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # its connections inherit it
        connection = await server.connect_slow_reader()
        connection.stop_reading()
        await connection.send(GET.replace(b"/", b"/small", 1) + b"connection: close\r\n\r\n")
        await server.wait_until_unconnected()

    run(talk, unread_timeout_s=0.3)


@pytest.mark.parametrize("path", [b"/big", b"/pieces"])
def test_slowly_read_answer_arrives(path: bytes) -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect_slow_reader()
        await connection.send(GET.replace(b"/", path, 1) + b"\r\n")
        await connection.head()
        for _ in range(10):
            await connection.read(2**17)  # far less than the kernel requests at a time
            await asyncio.sleep(0.2)
        await connection.read(BIG - 10 * 2**17)
        assert await connection.is_open()

    run(talk, unread_timeout_s=1.0)


def test_slowly_read_early_answer_arrives_while_the_client_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "LINGER_S", 0.1)

    async def talk(server: Server) -> None:
        connection = await server.connect_slow_reader()
        await connection.send(b"POST /big HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n")
        await connection.head()
        await asyncio.sleep(0.3)
        await connection.send(bytes(2**16))
        for _ in range(8):
            await connection.read(BIG // 8)
            await asyncio.sleep(0.02)
        assert await connection.is_closed()

    run(talk)


def test_cancelled_answer_closes_its_connection_and_logs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect()
        await connection.send(GET.replace(b"/", b"/begin", 1) + b"\r\n")
        await connection.head()
        [task] = server.state.tasks
        task.cancel()
        assert await connection.is_closed()

    run(talk)
    assert caplog.text == ""


def test_a_draining_server_closes_after_every_answer() -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect()
        assert await connection.is_open()
        server.draining.append(True)
        await connection.send(POST + b"content-length: 1\r\n\r\nx")
        answer = await connection.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await connection.is_closed()

    run(talk)


def test_upgrade_request_is_answered_over_http_1(caplog: pytest.LogCaptureFixture) -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect()
        for name in (b"h2c", b"websocket"):
            await connection.send(
                POST + b"connection: upgrade\r\nupgrade: " + name + b"\r\ncontent-length: 1\r\n\r\nx"
            )
            assert (await connection.answer()).body == b"1"
        assert await connection.is_open()

    run(talk)
    assert caplog.text == ""


UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nUpGrade: h2c\r\n"


BODY = b"a\r\nupgrade: x\r\n\r\n"  # looks like the header, but must not be changed


@pytest.mark.parametrize(
    "framed",
    [
        b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY),
        b"transfer-encoding: chunked\r\n\r\n5\r\n%b\r\n%x\r\n%b\r\n0\r\nupgrade: trailer\r\n\r\n"
        % (BODY[:5], len(BODY) - 5, BODY[5:]),
    ],
)
def test_upgrade_is_ignored_wherever_the_request_is_split(framed: bytes) -> None:
    request = POST + UPGRADE + framed

    async def talk(server: Server) -> None:
        connection = await server.connect()
        for cut in range(1, len(request)):
            await connection.send(request[:cut])
            await asyncio.sleep(0.001)
            await connection.send(request[cut:])
            answer = await connection.answer()
            assert (answer.status, answer.body) == (200, b"%d" % len(BODY)), cut
        for byte in request:
            await connection.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await connection.answer()).body == b"%d" % len(BODY)

    run(talk)


@pytest.mark.parametrize("before", [b"", UPGRADE])
def test_bytes_after_the_last_request_are_no_error(before: bytes) -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect()
        await connection.send(POST + before + b"content-length: 1\r\n\r\nx")
        assert (await connection.answer()).body == b"1"
        await connection.send(POST + b"connection: close\r\ncontent-length: 2\r\n\r\nxxno HTTP\r\n\r\n")
        assert (await connection.answer()).body == b"2"
        assert await connection.is_closed()
        assert server.refusals == []

    run(talk)


def test_several_upgrades_in_one_read_are_ignored() -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect()
        framed = b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
        await connection.send((POST + framed + POST + UPGRADE + framed + GET + UPGRADE + b"\r\n") * 2)
        answers = [await connection.answer() for _ in range(6)]
        assert [answer.status for answer in answers] == [200, 200, 413] * 2
        assert await connection.is_open()

    run(talk)


def test_pipelined_request_that_is_not_read_does_not_reset_the_answer_before_it() -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect()
        await connection.send(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
        await server.wait_until_asked()
        sending = asyncio.ensure_future(connection.send(bytes(2**20)))  # more than the server reads meanwhile
        await asyncio.sleep(0.1)
        server.draining.append(True)
        server.app.release.set()
        answer = await connection.answer()
        assert (answer.body, answer.headers["connection"]) == (b"waited", "close")
        await sending
        assert await connection.is_closed()

    run(talk)


@pytest.mark.parametrize("has_had_a_request", [True, False])
def test_request_that_crosses_the_end_of_an_idle_connection_meets_no_reset(
    monkeypatch: pytest.MonkeyPatch, has_had_a_request: bool
) -> None:
    monkeypatch.setattr(http_protocol, "LAST_CALL_S", 0.01)

    async def talk(server: Server) -> None:
        connection = await server.connect()
        if has_had_a_request:
            assert await connection.is_open()
        await asyncio.sleep(0.05)
        server.draining.append(True)
        for protocol in [*server.state.connections]:
            protocol.shutdown()
        assert await connection.is_closed()
        for _ in range(2):
            await connection.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await asyncio.sleep(0.02)
        assert await connection.is_closed()

    run(talk)


def test_request_that_crosses_the_keep_alive_timeout_meets_no_reset() -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect()
        assert await connection.is_open()
        assert await connection.is_closed()
        for _ in range(2):
            await connection.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await asyncio.sleep(0.02)
        assert await connection.is_closed()

    run(talk, keep_alive_s=1)


def test_request_whose_headers_arrive_during_the_shutdown_is_answered() -> None:
    async def talk(server: Server) -> None:
        fresh, begun = await server.connect(), await server.connect()
        await begun.send(b"GET / HTTP/1.1\r\nho")
        await asyncio.sleep(0.05)
        server.draining.append(True)
        for protocol in [*server.state.connections]:
            protocol.shutdown()
        await asyncio.sleep(0.05)
        await fresh.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await begun.send(b"st: x\r\n\r\n")
        for connection in (fresh, begun):
            answer = await connection.answer()
            assert (answer.status, answer.headers["connection"]) == (413, "close")
            assert await connection.is_closed()

    run(talk)

"""Requests that follow each other on one connection: refusals and answers come in their order."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from tests.support.http_server import BIG, CHUNKED, GET, POST, Server, run

BEGIN = GET.replace(b"/", b"/begin", 1) + b"\r\n"


EMPTY = POST + b"content-length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("behind", "num_served", "refusal"),
    [
        (b"no HTTP\r\n\r\n", 0, (400, "invalid_http")),
        (GET, 0, (408, "body_timeout")),
        (GET + b"a: b\r\n" * 100_000, 0, (431, "headers_too_large")),
        (CHUNKED + b"no size\r\n", 0, (400, "invalid_http")),
        (EMPTY * 2 + b"no HTTP\r\n\r\n", 2, (400, "invalid_http")),
        (EMPTY * 2 + CHUNKED + b"no size\r\n", 2, (400, "invalid_http")),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_refusal_waits_for_the_answers_before_it(
    behind: bytes, num_served: int, refusal: tuple[int, str], at_once: bool
) -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect()
        await connection.send(BEGIN + behind if at_once else BEGIN)
        assert await connection.head() == (200, {"content-length": "9"})
        if not at_once:
            await connection.send(behind)
        await asyncio.sleep(0.2)
        for _ in range(3):
            await connection.send(b"a: b\r\n")
            await asyncio.sleep(0.03)
        assert server.refusals == []
        server.app.release.set()
        assert await connection.read(9) == b"it begins"
        for _ in range(num_served):
            assert (await connection.answer()).body == b"0"
        answer = await connection.answer()
        assert (answer.status, answer.code) == refusal
        assert len(server.refusals) == 1
        assert await connection.is_closed()
        assert server.app.paths == ["/begin"] + ["/read"] * num_served

    run(talk, header_timeout_s=0.1)


def test_requests_after_a_refused_one_are_not_served() -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect()
        await connection.send(BEGIN)
        await connection.head()
        await connection.send(b"\r\n" * 2**17)
        await asyncio.sleep(0.1)
        await connection.send(EMPTY)
        await asyncio.sleep(0.05)
        server.app.release.set()
        assert await connection.read(9) == b"it begins"
        assert (await connection.answer()).code == "headers_too_large"
        assert await connection.is_closed()
        assert server.app.paths == ["/begin"]

    run(talk)


def test_bytes_after_a_waiting_refusal_are_not_read() -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect()
        await connection.send(BEGIN + b"no HTTP\r\n\r\n")
        await connection.head()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connection.send(bytes(BIG)), 0.3)
        server.app.release.set()
        assert await connection.read(9) == b"it begins"
        assert (await connection.answer()).code == "invalid_http"

    run(talk)


def test_no_refusal_is_sent_after_the_last_answer_of_a_connection() -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect()
        await connection.send(GET.replace(b"/", b"/wait", 1) + b"\r\nno HTTP\r\n\r\n")
        await server.wait_until_asked()
        server.draining.append(True)
        server.app.release.set()
        assert (await connection.answer()).body == b"waited"
        assert await connection.is_closed()
        assert server.refusals == []

    run(talk)


def test_a_malformed_body_ends_its_own_answer_that_has_begun() -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect()
        await connection.send(CHUNKED.replace(b"/read", b"/begin"))
        assert (await connection.head())[0] == 200
        await connection.send(b"no size\r\n")
        assert await connection.is_closed()
        assert server.refusals == []
        server.app.release.set()

    run(talk)


def test_header_timeout_starts_after_the_answers_before() -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect()
        await connection.send(BEGIN + GET)
        await connection.head()
        await asyncio.sleep(0.7)
        server.app.release.set()
        assert await connection.read(9) == b"it begins"
        await connection.send(b"\r\n")
        assert (await connection.answer()).status == 413

    run(talk, header_timeout_s=0.5)


def test_client_that_leaves_is_noticed_behind_pipelined_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect()
        await connection.send((GET.replace(b"/", b"/watch", 1) + b"\r\n") * 3)
        await asyncio.sleep(0.1)
        connection.reset()
        await asyncio.wait_for(server.app.left.wait(), 5)
        await asyncio.sleep(0.1)
        assert server.app.paths == ["/watch"]
        assert not server.state.tasks

    run(talk)
    assert caplog.text == ""


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        GET,
        GET + b"\r\n",
        CHUNKED + b"1\r\na",
        CHUNKED.replace(b"/read", b"/early"),
        GET.replace(b"/", b"/big", 1) + b"\r\n",
        (GET.replace(b"/", b"/watch", 1) + b"\r\n") * 3,
    ],
)
def test_lost_connection_is_not_kept_by_a_timer(sent: bytes) -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect_slow_reader()
        connection.stop_reading()
        await connection.send(sent)
        await asyncio.sleep(0.05)
        [protocol] = server.state.connections
        watched = [weakref.ref(protocol), weakref.ref(protocol.transport._transport)]  # type: ignore[attr-defined]
        del protocol
        connection.reset()
        await server.wait_until_unconnected()
        await asyncio.sleep(0.05)
        gc.collect()
        assert [found() for found in watched] == [None, None]

    run(talk)

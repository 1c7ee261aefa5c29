"""Requests on a connection: framing, limits, and bodies that are not read."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

import httpx
import pytest

from service.http import transport
from service.http.http_protocol import MAX_HEADER_BYTES
from service.http.transport import LINGER_BYTES, LINGER_S
from tests.support.http_server import CHUNKED, GET, POST, Server, run


def ends_with(data: bytes, status: int, code: str) -> None:
    """Sends `data` on a connection, and checks that it is refused so and closed."""

    async def talk(server: Server) -> None:
        connection = await server.connect()
        await connection.send(data)
        answer = await connection.answer()
        assert (answer.status, answer.code) == (status, code)
        assert [(error.status, error.code) for error in server.refusals] == [(status, code)]
        assert answer.headers["connection"] == "close"
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["vary"] == "accept"
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
        assert "server-timing" in answer.headers
        assert await connection.is_closed()
        connection.close()
        await server.wait_until_unconnected()

    run(talk)


def test_requests_follow_each_other_on_one_connection() -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect()
        for size in (0, 5, 300_000):
            await connection.send(POST + b"content-length: %d\r\n\r\n" % size + b"x" * size)
            answer = await connection.answer()
            assert (answer.status, answer.body) == (200, b"%d" % size)
            assert "connection" not in answer.headers
        await connection.send((POST + b"content-length: 1\r\n\r\nx") * 3)
        assert [(await connection.answer()).body for _ in range(3)] == [b"1"] * 3

    run(talk)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01",  # the start of TLS
        b"hello\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET nowhere HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        POST + b"content-length: many\r\n\r\n",
        CHUNKED + b"xyz\r\n",
    ],
)
def test_malformed_http_gets_the_error_body(data: bytes) -> None:
    ends_with(data, 400, "invalid_http")


@pytest.mark.parametrize(
    "data",
    [
        GET + b"a: " + b"x" * 2**20,
        GET + b"x" * 2**20,
        b"GET /" + b"x" * 2**20,
        GET + b"a: b\r\n" * 20_000,
        GET + b"a: " + b"x" * MAX_HEADER_BYTES + b"\r\n\r\n",
        POST + b"content-length: 5\r\na: " + b"x" * MAX_HEADER_BYTES + b"\r\n\r\nabcde",
        b"\r\n" * 2**17,
    ],
)
def test_headers_have_a_limit(data: bytes) -> None:
    ends_with(data, 431, "headers_too_large")


@pytest.mark.parametrize("behind", [b"a: " + b"x" * 2**20, b"a: b\r\n" * 100_000])
def test_trailers_have_the_same_limit(behind: bytes) -> None:
    ends_with(
        POST + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n" + behind, 431, "headers_too_large"
    )


def test_chunk_extensions_have_the_same_limit() -> None:
    ends_with(CHUNKED + b"3;a=" + b"x" * 2**20, 431, "headers_too_large")


def test_headers_up_to_the_limit_pass_and_so_do_tiny_chunks_and_trailers() -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect()
        await connection.send(POST + b"a: " + b"x" * (MAX_HEADER_BYTES - 100) + b"\r\n\r\n")
        assert (await connection.answer()).body == b"0"
        chunks = b"1\r\nx\r\n" * 50_000 + b"0\r\ncontent-type: trailer\r\n\r\n"
        await connection.send(CHUNKED + chunks)
        assert (await connection.answer()).body == b"50000"
        assert b"content-type" not in dict(server.app.headers[-1])

    run(talk)


def test_headers_that_do_not_end_time_out() -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect()
        assert await connection.is_open()
        await connection.send(GET[:20])
        answer = await connection.answer()
        assert (answer.status, answer.code) == (408, "body_timeout")
        assert await connection.is_closed()

    run(talk, header_timeout_s=0.2)


def test_a_complete_request_may_take_longer_than_its_headers() -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect()
        await connection.send(GET.replace(b"/", b"/wait", 1) + b"\r\n")
        await asyncio.sleep(0.3)
        server.app.release.set()
        assert (await connection.answer()).body == b"waited"

    run(talk, header_timeout_s=0.1)


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n"])
def test_a_connection_without_a_request_is_closed_without_an_answer(sent: bytes) -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect()
        await connection.send(sent)
        assert await connection.is_closed()

    run(talk, keep_alive_s=1)


@pytest.mark.parametrize("framing", [b"content-length: 300\r\n", b"transfer-encoding: chunked\r\n"])
def test_an_answer_before_the_body_was_read_is_the_last_one(
    framing: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "LINGER_S", 60.0)  # the writing side must be closed at once

    async def talk(server: Server) -> None:
        connection = await server.connect()
        await connection.send(b"POST / HTTP/1.1\r\nhost: x\r\n" + framing + b"\r\n")
        answer = await connection.answer()
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        assert await connection.is_closed()

    run(talk)


def test_connection_stays_open_if_the_body_had_arrived() -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect()
        await connection.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc")
        assert "connection" not in (await connection.answer()).headers
        assert await connection.is_open()

    run(talk)


@pytest.mark.parametrize(("path", "status"), [(b"/read", 100), (b"/", 413)])
def test_100_continue_is_sent_only_if_the_body_is_read(path: bytes, status: int) -> None:
    """A client that expects 100 sends its body only after it, and not after a refusal."""

    async def talk(server: Server) -> None:
        connection = await server.connect()
        head = b"POST %b HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n"
        await connection.send(head % path)
        first, _ = await connection.head()
        assert first == status
        if first == 100:
            await connection.send(b"abc")
            answer = await connection.answer()
            assert (answer.status, answer.body) == (200, b"3")

    run(talk)


def test_bytes_after_an_early_answer_are_read_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "LINGER_S", 0.5)

    async def talk(server: Server) -> None:
        connection = await server.connect()
        await connection.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
        num_bytes = await connection.flood()
        assert LINGER_BYTES / 2 < num_bytes < LINGER_BYTES + 2**25  # plus the kernel's buffers
        await server.wait_until_unconnected()

    run(talk)


@pytest.mark.parametrize("size", [100_000_000, 3_000_000])
def test_clients_that_are_still_sending_get_the_answer(size: int, tmp_path: Path) -> None:
    body = bytes(size)
    file = tmp_path / "body"
    file.write_bytes(body)

    def curl(url: str) -> str:
        command = ["curl", "-s", "-w", "%{http_code}", "--data-binary", f"@{file}", "-H", "Expect:", url]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    def post(url: str) -> str:
        response = httpx.post(url, content=body, timeout=60)
        return f"{response.text}{response.status_code}"

    async def talk(server: Server) -> None:
        for client in (curl, post):
            assert await asyncio.to_thread(client, server.url) == "early413"

    run(talk)


def test_a_malformed_body_ends_the_request_that_reads_it() -> None:
    async def talk(server: Server) -> None:
        connection = await server.connect()
        await connection.send(CHUNKED + b"3\r\nabc\r\n")
        await asyncio.sleep(0.05)
        await connection.send(b"no size\r\n")
        assert (await connection.answer()).code == "invalid_http"
        await asyncio.wait_for(server.app.left.wait(), LINGER_S / 2)

    run(talk)

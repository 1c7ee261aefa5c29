"""Connections to a real server. Most clients send bytes that no HTTP library would send."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import struct
import subprocess
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import pytest
import uvicorn
import uvloop
from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from service.errors import ApiError
from service.http import http_protocol, transport
from service.http.http_protocol import MAX_HEADER_BYTES, Protocol
from service.http.transport import LINGER_BYTES, LINGER_S

GET = b"GET / HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /read HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
BIG = 24 * 2**20  # bytes, more than kernels buffer


class App:
    """Reads the body of /read and answers its size. Answers 413 to unknown paths, without reading."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.paths: list[str] = []
        self.headers: list[list[tuple[bytes, bytes]]] = []
        self.release = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        path = request.url.path
        self.paths.append(path)
        if path == "/read":
            try:
                body = await request.body()
            except ClientDisconnect:
                self.left.set()
                return
            self.headers.append(scope["headers"])
            await Response(b"%d" % len(body))(scope, receive, send)
        elif path == "/begin":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
            await self.release.wait()
            await send({"type": "http.response.body", "body": b"it begins"})
        elif path == "/watch":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()
            await Response()(scope, receive, send)
        elif path == "/big":
            await Response(bytes(BIG))(scope, receive, send)
        elif path == "/small":
            await Response(bytes(60_000))(scope, receive, send)  # too few bytes to pause the writing
        elif path == "/pieces":
            length = [(b"content-length", b"%d" % BIG)]
            await send({"type": "http.response.start", "status": 200, "headers": length})
            try:
                for piece in range(BIG, 0, -(2**20)):
                    more = piece > 2**20
                    await send({"type": "http.response.body", "body": bytes(2**20), "more_body": more})
            except ClientDisconnect:
                self.left.set()
                raise
        elif path == "/wait":
            await self.release.wait()
            await Response(b"waited")(scope, receive, send)
        else:
            await Response(b"early", 413)(scope, receive, send)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        code: str = json.loads(self.body)["error"]["code"]
        return code


class Connection:
    """A client that sends arbitrary bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        head = (await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 10)).decode().split("\r\n")
        return int(head[0].split()[1]), dict(line.lower().split(": ", 1) for line in head[1:-2])

    async def answer(self) -> Answer:
        status, headers = await self.head()
        return Answer(status, headers, await self._reader.readexactly(int(headers["content-length"])))

    async def read(self, num_bytes: int) -> bytes:
        return await asyncio.wait_for(self._reader.readexactly(num_bytes), 10)

    def stop_reading(self) -> None:
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    async def is_closed(self) -> bool:
        """Waits until the server closes. Returns False if it sends more instead."""
        return not await asyncio.wait_for(self._reader.read(1), 10)

    async def flood(self) -> int:
        """Sends bytes until the server closes the connection, and returns their number."""
        num_bytes = 0
        try:
            async with asyncio.timeout(10):
                while True:
                    await self.send(bytes(2**20))
                    num_bytes += 2**20
        except ConnectionError:
            return num_bytes

    async def is_open(self) -> bool:
        await self.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        return (await self.answer()).status == 413

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        linger = struct.pack("ii", 1, 0)
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._writer.transport.abort()


@dataclass
class Server:
    app: App
    port: int
    listener: socket.socket
    state: ServerState
    draining: list[bool]
    refusals: list[ApiError]
    clients: list[Connection] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def connect(self) -> Connection:
        self.clients.append(Connection(*await asyncio.open_connection("127.0.0.1", self.port)))
        return self.clients[-1]

    async def connect_slow_reader(self) -> Connection:
        """Connects a client with a small receive buffer."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", self.port))  # does not block: the listener's backlog has room
        self.clients.append(Connection(*await asyncio.open_connection(sock=client)))
        return self.clients[-1]

    async def wait_until_asked(self) -> None:
        async with asyncio.timeout(10):
            while not self.app.paths:  # noqa: ASYNC110 - the app tells no one
                await asyncio.sleep(0.01)

    async def wait_until_unconnected(self) -> None:
        async with asyncio.timeout(10):
            while self.state.connections:  # noqa: ASYNC110 - uvicorn tells no one
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(
    header_timeout_s: float, keep_alive_s: int, unread_timeout_s: float
) -> AsyncIterator[Server]:
    app, state, draining, refusals = App(), ServerState(), list[bool](), list[ApiError]()
    config = uvicorn.Config(app, ws="none", log_config=None, timeout_keep_alive=keep_alive_s)
    config.load()
    make = partial(
        Protocol,
        header_timeout_s=header_timeout_s,
        is_draining=lambda: bool(draining),
        count_refusal=refusals.append,
        unread_timeout_s=unread_timeout_s,
    )
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: make(config, state, {}), "127.0.0.1", 0)
    server = Server(app, listener.sockets[0].getsockname()[1], listener.sockets[0], state, draining, refusals)
    try:
        yield server
    finally:
        listener.close()
        for client in server.clients:
            client.close()
        await server.wait_until_unconnected()


def run(
    talk: Callable[[Server], Coroutine[None, None, None]],
    *,
    header_timeout_s: float = 30.0,
    keep_alive_s: int = 30,
    unread_timeout_s: float = 30.0,
) -> None:
    async def main() -> None:
        async with serving(header_timeout_s, keep_alive_s, unread_timeout_s) as server:
            await talk(server)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


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

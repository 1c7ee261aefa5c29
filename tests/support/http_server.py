"""A server with the HTTP protocol under test, and its clients on plain sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import uvicorn
import uvloop
from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from service.errors import ApiError
from service.http.http_protocol import Protocol

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

"""A cheap HTTP/1.1 client: requests are ready bytes, and of an answer it keeps only what the report needs.

Knows connections and framing, of http:// only. Knows nothing of the content of requests or of load.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import httptools

_MAX_ERROR_BYTES = 65536  # of an error body; the code is within the first few hundred


class SendError(Exception):
    """A request got no answer. The message is one of `connect`, `closed`, `invalid_http`, `timeout`."""


@dataclass(frozen=True)
class Answer:
    """The parts of an answer that are counted."""

    status: int
    code: str  # of the error body; empty for 2xx, `none` if the body has no code
    param: str = ""  # of the error body, such as `images[3]`; empty if the body has none
    body: bytes = b""  # of 2xx, if bodies are kept


class Connection(asyncio.Protocol):
    """One connection, with at most one request at a time. While `is_open`, it can take another request."""

    def __init__(self, keeps_bodies: bool = False) -> None:
        self.is_open = False
        self._keeps_bodies = keeps_bodies
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._waiting: asyncio.Future[Answer] | None = None
        self._forget_answer()

    def send(self, pieces: Sequence[bytes | memoryview]) -> asyncio.Future[Answer]:
        """Sends a whole request, in pieces. The future ends with the answer or a `SendError`."""
        assert self.is_open, "the connection is closed"
        assert self._waiting is None, "the last request has no answer yet"
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.writelines(pieces)
        return self._waiting

    def abort(self) -> None:
        """Closes the connection at once and drops unsent data."""
        self.is_open = False
        self._transport.abort()

    # Callbacks of the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._waiting is None:  # an answer without a request: the server is about to close
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.abort()
            self._fail("invalid_http")

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        # RFC 9112, section 6.3: a body without a length ends with its connection.
        if self._waiting is not None and error is None and self._is_in_body and not self._has_length:
            self.on_message_complete()
        self._fail("closed")

    # Callbacks of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        self._is_in_body = True
        self._is_error = self._parser.get_status_code() >= 300

    def on_body(self, body: bytes) -> None:
        if self._keeps_bodies or (self._is_error and len(self._body) < _MAX_ERROR_BYTES):
            self._body += body

    def on_message_complete(self) -> None:
        status, body = self._parser.get_status_code(), self._body
        keeps_alive = self._parser.should_keep_alive()
        self._forget_answer()
        if status < 200:
            return  # an interim response: the answer follows
        waiting, self._waiting = self._waiting, None
        if not keeps_alive:
            self.abort()
        if waiting is not None and not waiting.done():
            is_ok = status < 300
            waiting.set_result(Answer(status, "", body=body) if is_ok else _read_error(status, body))

    def _forget_answer(self) -> None:
        self._has_length = self._is_in_body = self._is_error = False
        self._body = b""

    def _fail(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(SendError(reason))


def _read_error(status: int, body: bytes) -> Answer:
    """Reads the code and the parameter in a body such as `{"error": {"code": "draining", "param": null}}`."""
    try:
        error = json.loads(body)["error"]
        return Answer(status, str(error["code"])[:64], str(error.get("param") or "")[:64])
    except (ValueError, LookupError, TypeError, AttributeError):
        return Answer(status, "none")


class Client:
    """Sends requests to one address. Each uses an idle connection, or a new one if none is idle."""

    def __init__(self, host: str, port: int, timeout_s: float, *, keeps_bodies: bool = False) -> None:
        self._host, self._port = host, port
        self._make_connection = partial(Connection, keeps_bodies)
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []  # the last used is at the end, so that unneeded ones stay idle

    async def send(self, pieces: Sequence[bytes | memoryview]) -> Answer:
        """Sends a request and returns the answer. Raises `SendError`."""
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = self._take_idle() or await self._open()
                try:
                    answer = await connection.send(pieces)
                except BaseException:
                    connection.abort()
                    raise
        except TimeoutError:
            raise SendError("timeout") from None
        if connection.is_open:
            self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Closes the idle connections."""
        for connection in self._idle:
            connection.abort()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(self._make_connection, self._host, self._port)
        except TimeoutError:
            raise  # of `asyncio.timeout` in `send`
        except OSError:
            raise SendError("connect") from None
        return connection

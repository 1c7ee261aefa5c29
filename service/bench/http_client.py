"""HTTP/1.1 that costs little to send: requests as ready bytes, and of an answer only what is counted.

Knows connections and framing, of http:// only; nothing of what is sent, of load or of how it is reported.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import httptools

_MAX_ERROR_BYTES = 65536  # of an error's body; codes stand in the first few hundred


class SendError(Exception):
    """A request that got no answer. The message is one of `connect`, `closed`, `invalid_http`, `timeout`."""


@dataclass(frozen=True)
class Answer:
    """What is counted of an answer."""

    status: int
    code: str  # of the error body; empty for 2xx, `none` where no code can be read


class Connection(asyncio.Protocol):
    """One connection, with at most one request on it. `is_open` says whether it can take another."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._waiting: asyncio.Future[Answer] | None = None
        self._forget_answer()

    def send(self, request: memoryview) -> asyncio.Future[Answer]:
        """Sends a whole request. The future has its answer or a `SendError`."""
        assert self.is_open, "a connection that was closed"
        assert self._waiting is None, "an answer is still to come"
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._waiting

    def abort(self) -> None:
        """Ends the connection at once, whatever is still to be sent."""
        self.is_open = False
        self._transport.abort()

    # Callbacks of the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._waiting is None:  # nobody asked: the server is about to close
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
        if self._is_error and len(self._error_body) < _MAX_ERROR_BYTES:
            self._error_body += body

    def on_message_complete(self) -> None:
        status, body = self._parser.get_status_code(), self._error_body
        keeps_alive = self._parser.should_keep_alive()
        self._forget_answer()
        if status < 200:
            return  # the answer is still to come
        waiting, self._waiting = self._waiting, None
        if not keeps_alive:
            self.abort()
        if waiting is not None and not waiting.done():
            waiting.set_result(Answer(status, "" if status < 300 else _error_code(body)))

    def _forget_answer(self) -> None:
        self._has_length = self._is_in_body = self._is_error = False
        self._error_body = b""

    def _fail(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(SendError(reason))


def _error_code(body: bytes) -> str:
    """The code in a body such as `{"error": {"code": "draining"}}`."""
    try:
        return str(json.loads(body)["error"]["code"])[:64]
    except (ValueError, LookupError, TypeError):
        return "none"


class Client:
    """Sends requests to one address, each on an idle connection or else a new one."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._host, self._port = host, port
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []  # the last used at the end, so that no more than needed stay open

    async def send(self, request: memoryview) -> Answer:
        """The answer to a request. Raises `SendError`."""
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = self._take_idle() or await self._open()
                try:
                    answer = await connection.send(request)
                except BaseException:
                    connection.abort()
                    raise
        except TimeoutError:
            raise SendError("timeout") from None
        if connection.is_open:
            self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Ends the idle connections."""
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
            _, connection = await loop.create_connection(Connection, self._host, self._port)
        except TimeoutError:
            raise  # ours
        except OSError:
            raise SendError("connect") from None
        return connection

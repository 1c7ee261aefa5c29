"""HTTP/1.1 on one connection: uvicorn's protocol, with limits on headers, trailers and time.

- Headers, trailers and all other bytes outside of a body are limited to 64 KiB a section. The headers of a
  request must be complete within a limited time, and so must the wait for the first request of a connection.
- Malformed HTTP, and requests over such a limit, are answered with the one error body, like all errors.
- A refusal is sent after the responses to the requests before it.
- A response that is sent before the request's body was read ends the connection. The rest of the body is
  read and dropped for a while, so that the client gets the response instead of a reset (RFC 9112, 9.6).
- A client that reads nothing of its response is cut off. `send` raises `ClientDisconnect` once a client has
  left.

Knows HTTP framing; knows nothing of routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from starlette.requests import ClientDisconnect
from uvicorn import Config
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from service.errors import ApiError, BadRequest, BodyTimeout, HeadersTooLarge
from service.http.response_parts import (
    FIXED_HEADERS,
    Headers,
    ResponseCutOff,
    error_response,
    identity_headers,
    new_request_id,
)
from service.http.transport import LingeringTransport, UnreadWatch

MAX_HEADER_BYTES = 2**16
UNREAD_TIMEOUT_S = 30.0
# At shutdown, how long a connection still accepts a request: a new one, whose client is about to send it, or
# one on which its headers are arriving; and one that was kept open.
LAST_CALL_S, IDLE_LAST_CALL_S = 1.0, 0.1

_FRAMING = (b"content-length", b"transfer-encoding")


class Protocol(HttpToolsProtocol):
    """One connection. While `is_draining()`, it is closed after its next response.

    `count_refusal` is called for each error that is sent from here, without the app. A client that reads
    nothing of a response for `unread_timeout_s` is cut off. `on_closed` is called when the connection ends.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        header_timeout_s: float,
        is_draining: Callable[[], bool],
        count_refusal: Callable[[ApiError], None],
        on_closed: Callable[[], None] = lambda: None,
        unread_timeout_s: float = UNREAD_TIMEOUT_S,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._header_timeout_s = header_timeout_s
        self._is_draining = is_draining
        self._count_refusal = count_refusal
        self._on_closed = on_closed
        self._unread_timeout_s = unread_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None
        self._has_begun = False  # whether the first bytes of a request have come, but not all of its headers
        self._in_headers = True  # whether the next byte is part of headers, or comes before them
        self._is_resuming = False  # while a new parser is told of headers that asked for an upgrade
        self._num_header_bytes = 0  # since the last byte of a body
        self._refusal: ApiError | None = None  # of the last request; no more bytes are read
        # The request that is being answered, or was answered last. uvicorn's `cycle` is the last one read.
        self._answered: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._unread = UnreadWatch(transport, self._unread_timeout_s)
        self._lingering = LingeringTransport(transport, self, self._unread, self._is_in_request)
        super().connection_made(self._lingering)
        # uvicorn starts this timer only after an answer, but a connection may never send a request at all.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._unread.stop()
        self._stop_header_timer()
        self._unset_keepalive_if_required()
        self._stop_answering()  # uvicorn notifies the last request only
        super().connection_lost(exc)
        self._on_closed()

    def shutdown(self) -> None:
        """Closes the connection once no answer is due. Called at shutdown, while `is_draining()`.

        A request that arrives within a moment is answered, and its answer is the last one.
        """
        if self._is_answering:
            super().shutdown()
        else:
            is_expected = self._has_begun or self._answered is None
            self.loop.call_later(LAST_CALL_S if is_expected else IDLE_LAST_CALL_S, self._close_if_idle)

    def timeout_keep_alive_handler(self) -> None:
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if not self._is_answering:
            self._lingering.close_idle()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.start()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            self.flow.pause_reading()
            return
        self._num_header_bytes += len(data)
        try:
            while data:
                data = self._feed(data)
        except httptools.HttpParserError:
            self._refuse(_invalid_http())
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse(_headers_too_large())

    def _feed(self, data: bytes) -> bytes:
        """Feeds the parser. Returns the bytes after headers that ask for an upgrade, still to be fed.

        No upgrade is served, so it is ignored: a new parser is told the body's framing and reads the body.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as wish:
            framing = [header for header in self.headers if header[0] in _FRAMING]
            self.parser = httptools.HttpRequestParser(self)
            self._is_resuming = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % _header_lines(framing))
            self._is_resuming = False
            rest = data[wish.args[0] :]
            self._num_header_bytes = len(rest)
            return rest
        return b""

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        if self._is_resuming:
            return
        super().on_message_begin()
        self._has_begun = True
        if not self._is_answering:
            self._start_header_timer()

    def on_url(self, url: bytes) -> None:
        if not self._is_resuming:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # else it is a trailer, which is not used
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_resuming:
            return
        # A single read may hold all headers, too large, and the body after them.
        if self._num_header_bytes > MAX_HEADER_BYTES and self._header_size() > MAX_HEADER_BYTES:
            self._refuse(_headers_too_large())
            raise ValueError("headers too large")
        self._has_begun = self._in_headers = False
        self._num_header_bytes = 0
        self._stop_header_timer()
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._num_header_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._num_header_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the body is still to come
        self._in_headers = True
        self._num_header_bytes = 0
        super().on_message_complete()

    # Methods of uvicorn's protocol

    def _should_upgrade(self) -> bool:
        return False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle

        async def answering(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
            async def send_and_maybe_close(message: ASGISendEvent) -> None:
                if message["type"] == "http.response.start" and (cycle.more_body or self._is_draining()):
                    cycle.keep_alive = False  # adds `Connection: close`, and closes after the response
                await send(message)
                if cycle.disconnected:
                    raise ClientDisconnect

            try:
                await app(scope, receive, send_and_maybe_close)
            except ClientDisconnect:
                pass  # nobody is left to read a response
            except (asyncio.CancelledError, ResponseCutOff):  # in the middle of a response
                cycle.disconnected = True
                self.transport.close()

        super()._start_asgi_task(cycle, answering)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # starts the next request, if one waits
        if self._is_answering or self.transport.is_closing():
            return
        if self._refusal is not None:
            self._end_with(self._refusal)
        elif self._has_begun:
            self._start_header_timer()

    def _header_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _is_in_request(self) -> bool:
        """Whether the bytes read so far end in the middle of a request."""
        return (
            not self._in_headers
            or self._num_header_bytes > 0
            or self._refusal is not None
            or bool(self.pipeline)  # reading is paused, and more may be in the kernel
        )

    @property
    def _is_answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    def _start_header_timer(self) -> None:
        self._unset_keepalive_if_required()
        self._header_timer = self.loop.call_later(self._header_timeout_s, self._on_header_timeout)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        self._refuse(BodyTimeout(f"the headers did not arrive within {self._header_timeout_s:g} s"))

    def _refuse(self, error: ApiError) -> None:
        """Refuses the request that was read last, once the requests before it are answered."""
        if self.transport.is_closing() or self._refusal is not None:
            return
        self._refusal = error
        if self.pipeline and not self._in_headers:
            self.pipeline.popleft()  # the request that is refused
        is_later = self._in_headers or self.cycle is not self._answered
        if not (is_later and self._is_answering):
            self._end_with(error)

    def _end_with(self, error: ApiError) -> None:
        """Ends the connection, with an error response unless another response has begun."""
        cycle = self._answered
        if cycle is None or cycle.response_complete or not cycle.response_started:
            headers, body = error_response(error)
            headers += FIXED_HEADERS + identity_headers(new_request_id(), {"total": 0})
            headers.append((b"connection", b"close"))
            lines = _header_lines(headers)
            self.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[error.status], lines, body))
            self._count_refusal(error)
        self._stop_answering()
        self.transport.close()

    def _stop_answering(self) -> None:
        """Tells the app that the client has left."""
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()


def _header_lines(headers: Headers) -> bytes:
    return b"".join(b"%b: %b\r\n" % header for header in headers)


def _invalid_http() -> BadRequest:
    return BadRequest("the request is not valid HTTP/1.1", code="invalid_http")


def _headers_too_large() -> HeadersTooLarge:
    return HeadersTooLarge(f"the request has more than the {MAX_HEADER_BYTES} bytes of headers allowed")

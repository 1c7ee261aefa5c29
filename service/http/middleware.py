"""Around every request: its id, the headers of every answer, metrics, and errors as the one error body.

Plain ASGI. Knows HTTP and the error tree; knows nothing of images or models.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Collection, Sequence
from typing import NoReturn, cast

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import ApiError, ErrorCode, InternalError, MethodNotAllowed, NotFound, Unavailable
from service.http.context import RequestContext
from service.http.cors import Cors
from service.http.response_parts import FIXED_HEADERS, Headers, error_answer, identity_headers, new_request_id
from service.metrics import CLIENT_LEFT, OTHER, Metrics

logger = logging.getLogger(__name__)

_EXCHANGE = "vision_sidecar.exchange"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class RequestMiddleware:
    """Wraps the app. Requests to `probes` are answered like others, but neither counted nor logged.

    Pages of `cors_origins` may read every answer, errors too: those are made within what tells browsers so.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, probes: frozenset[str], cors_origins: Sequence[str] = ()
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._probes = probes
        self._answering: ASGIApp = Cors(self._answer, cors_origins) if cors_origins else self._answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_probe = scope["path"] in self._probes
        exchange = _Exchange(scope, send, routes=self._metrics.routes, is_logged=not is_probe)
        if is_probe:
            await self._pass(exchange, receive)
            return
        self._metrics.requests_in_flight.inc()
        try:
            await self._pass(exchange, receive)
        finally:
            self._metrics.requests_in_flight.dec()
            self._record(exchange)

    async def _pass(self, exchange: _Exchange, receive: Receive) -> None:
        try:
            await self._answering(exchange.scope, receive, exchange.send)
        finally:
            del exchange.scope[_EXCHANGE]  # else each would hold the other until garbage is collected

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: _Exchange = scope[_EXCHANGE]
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            exchange.status = CLIENT_LEFT
            if exchange.is_logged:
                logger.info("%s: the caller left", exchange.title, extra=exchange.log_members())
        except ApiError as error:
            if exchange.is_logged:
                self._log(exchange, error)
            await exchange.send_error(error, send)
        except asyncio.CancelledError:
            if exchange.started:
                raise
            cut_off = Unavailable("the server stopped before it could answer", code="draining")
            if exchange.is_logged:
                self._log(exchange, cut_off)
            await exchange.send_error(cut_off, send)
        except Exception:
            logger.exception("%s failed", exchange.title, extra=exchange.log_members())
            if exchange.started:
                raise  # the server closes the connection, so that the caller sees that the answer is cut
            await exchange.send_error(
                InternalError("the server failed to answer; its log has the request id"), send
            )

    def _log(self, exchange: _Exchange, error: ApiError) -> None:
        """One line. Only what is the server's own fault is an error of the server."""
        logger.log(
            logging.ERROR if error.status == 500 else logging.INFO,
            "%s: %d %s: %s",
            exchange.title,
            error.status,
            error.code,
            error.message,
            exc_info=error.__cause__ if error.status == 500 else None,
            extra=exchange.log_members(error),
        )

    def _record(self, exchange: _Exchange) -> None:
        duration_s = time.perf_counter() - exchange.context.started_at
        self._metrics.observe_request(exchange.route, exchange.status, duration_s)
        for stage, seconds in exchange.context.stages_s.items():
            self._metrics.observe_stage(stage, seconds)
        if exchange.error is not None:
            self._metrics.count_error(exchange.error)


class _Exchange:
    """One request and its answer on their way through."""

    def __init__(self, scope: Scope, send: Send, *, routes: Collection[str], is_logged: bool) -> None:
        self.context = RequestContext(_request_id(scope))
        self.context.attach(scope)
        # A HEAD is a GET whose body is not sent, so that no route needs to know of it.
        self.method: str = scope["method"]
        self.is_head = self.method == "HEAD"
        self.scope = {**scope, "method": "GET"} if self.is_head else scope
        self.scope[_EXCHANGE] = self
        self.is_logged = is_logged
        self.status = 500
        self.started = False
        self.error: ErrorCode | None = None
        self._routes = routes
        self._send = send

    @property
    def route(self) -> str:
        """The template of the route that the router found; of what was answered before it, its known path."""
        found = self.scope.get("route")
        if found is not None:
            return cast(str, found.path)
        return cast(str, self.scope["path"]) if self.scope["path"] in self._routes else OTHER

    @property
    def title(self) -> str:
        """What the log calls it."""
        return f"{self.method} {self.route} [{self.context.request_id}]"

    def log_members(self, error: ApiError | None = None) -> dict[str, object]:
        """What a structured log has of it as members."""
        return {
            "request_id": self.context.request_id,
            "method": self.method,
            "route": self.route,
            "status": self.status if error is None else error.status,
            "code": None if error is None else error.code,
        }

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *FIXED_HEADERS, *self._own_headers()]
        elif self.is_head:
            message = {**message, "body": b""}
        await self._send(message)

    async def send_error(self, error: ApiError, send: Send) -> None:
        """`send` ends in this exchange's own."""
        self.error = error.code
        headers, body = error_answer(error)
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _own_headers(self) -> Headers:
        timings_ms = {str(stage): seconds * 1e3 for stage, seconds in self.context.stages_s.items()}
        timings_ms["total"] = (time.perf_counter() - self.context.started_at) * 1e3
        return identity_headers(self.context.request_id, timings_ms)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return cast(bytes, value).decode()
    return new_request_id()


async def raise_api_error(request: Request, error: Exception) -> NoReturn:
    """Handler of the router's own errors: raises what the error tree has for them."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = set((error.headers or {})["Allow"].split(", "))
        allow = ", ".join(sorted(allowed | ({"HEAD"} if "GET" in allowed else set())))
        raise MethodNotAllowed(f"{request.scope['path']} takes {allow}", allow=allow)
    assert error.status_code == 404, f"the router raised {error.status_code}"
    raise NotFound("there is no such path; /docs has those that there are")

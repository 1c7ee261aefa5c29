"""Gives every request its id, common headers, metrics, a line in the log if it fails, and errors as JSON.

Plain ASGI. Knows HTTP and the error tree; knows nothing of images or models.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import NoReturn, cast

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import ApiError, InternalError, MethodNotAllowed, NotFound, Unavailable
from service.http.context import RequestContext, context_of
from service.http.cors import Cors
from service.http.response_parts import (
    FIXED_HEADERS,
    Headers,
    ResponseCutOff,
    error_response,
    identity_headers,
    new_request_id,
)
from service.metrics import CLIENT_LEFT, OTHER, Metrics

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class RequestMiddleware:
    """Wraps the app. Requests to `probes` are answered like all others, but neither counted nor logged.

    Pages of `cors_origins` may read every response: CORS headers are added outside of the error handling.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, probes: frozenset[str], cors_origins: Sequence[str] = ()
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._probes = probes
        self._respond: ASGIApp = (
            Cors(self._handle_errors, cors_origins) if cors_origins else self._handle_errors
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_probe = scope["path"] in self._probes
        context = RequestContext(_request_id(scope), scope["method"], is_logged=not is_probe)
        if context.method == "HEAD":
            scope = {**scope, "method": "GET"}  # no route needs to know HEAD: the body is dropped below
        context.attach(scope)
        send = _with_headers(context, send)
        if is_probe:
            await self._respond(scope, receive, send)
            return
        self._metrics.requests_in_flight.inc()
        try:
            await self._respond(scope, receive, send)
        finally:
            self._metrics.requests_in_flight.dec()
            self._record(scope, context)

    async def _handle_errors(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            context.status = CLIENT_LEFT
            if context.is_logged:
                logger.info("%s: the caller left", self._title(scope), extra=self._log_members(scope))
        except ApiError as error:
            self._log(scope, error)
            if context.response_has_begun:
                raise ResponseCutOff from error
            await _send_error(context, error, send)
        except asyncio.CancelledError:
            if context.response_has_begun:
                raise
            cut_off = Unavailable("the server stopped before it could answer", code="draining")
            self._log(scope, cut_off)
            await _send_error(context, cut_off, send)
        except Exception:
            logger.exception("%s failed", self._title(scope), extra=self._log_members(scope))
            if context.response_has_begun:
                raise  # the server closes the connection, so that the caller sees that the response is cut
            failure = InternalError("the server failed to answer; its log has the request id")
            await _send_error(context, failure, send)

    def _record(self, scope: Scope, context: RequestContext) -> None:
        self._metrics.observe_request(self._route(scope), context.status, context.duration_s)
        for stage, seconds in context.stages_s.items():
            self._metrics.observe_stage(stage, seconds)
        if context.error_code is not None:
            self._metrics.count_error(context.error_code)

    def _log(self, scope: Scope, error: ApiError) -> None:
        """Logs a refused or failed request in one line. Only status 500 is an error of the server."""
        if not context_of(scope).is_logged:
            return
        logger.log(
            logging.ERROR if error.status == 500 else logging.INFO,
            "%s: %d %s: %s",
            self._title(scope),
            error.status,
            error.code,
            error.message,
            exc_info=error.__cause__ if error.status == 500 else None,
            extra=self._log_members(scope, error),
        )

    def _title(self, scope: Scope) -> str:
        """The request as the log names it."""
        context = context_of(scope)
        return f"{context.method} {self._route(scope)} [{context.request_id}]"

    def _log_members(self, scope: Scope, error: ApiError | None = None) -> dict[str, object]:
        """The members that a structured log has for the request."""
        context = context_of(scope)
        return {
            "request_id": context.request_id,
            "method": context.method,
            "route": self._route(scope),
            "status": context.status if error is None else error.status,
            "code": None if error is None else error.code,
        }

    def _route(self, scope: Scope) -> str:
        """The template of the route. If the router was not reached, the path, if it is one of ours."""
        found = scope.get("route")
        if found is not None:
            return cast(str, found.path)
        return cast(str, scope["path"]) if scope["path"] in self._metrics.routes else OTHER


def _with_headers(context: RequestContext, send: Send) -> Send:
    """Adds to `send` the headers that every response has. Drops the body if the method is HEAD."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            context.status = message["status"]
            context.response_has_begun = True
            headers = message.get("headers", ())
            message["headers"] = [*headers, *FIXED_HEADERS, *_headers_of(context)]
        elif context.method == "HEAD":
            message = {**message, "body": b""}
        await send(message)

    return send_with_headers


def _headers_of(context: RequestContext) -> Headers:
    timings_ms = {str(stage): seconds * 1e3 for stage, seconds in context.stages_s.items()}
    timings_ms["total"] = context.duration_s * 1e3
    return identity_headers(context.request_id, timings_ms, is_cached=context.is_cached)


async def _send_error(context: RequestContext, error: ApiError, send: Send) -> None:
    context.error_code = error.code
    headers, body = error_response(error)
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return cast(bytes, value).decode()
    return new_request_id()


async def raise_api_error(request: Request, error: Exception) -> NoReturn:
    """Handles the errors of the router: raises the `ApiError` in their place."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = set((error.headers or {})["Allow"].split(", "))
        allow = ", ".join(sorted(allowed | ({"HEAD"} if "GET" in allowed else set())))
        raise MethodNotAllowed(f"{request.scope['path']} takes {allow}", allow=allow)
    assert error.status_code == 404, f"the router raised {error.status_code}"
    raise NotFound("there is no such path; /docs lists the paths")

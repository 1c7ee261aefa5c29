from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from fastapi import Request, Response
from prometheus_client import CollectorRegistry
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import (
    ApiError,
    BadRequest,
    DeadlineExceeded,
    InternalError,
    NonFiniteOutput,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from service.http.context import context_of
from service.http.middleware import RequestMiddleware
from service.metrics import Metrics

Headers = Sequence[tuple[bytes, bytes]]


class Route:
    path = "/embed"


class Run:
    """One request through the middleware around `app`."""

    def __init__(
        self, app: ASGIApp, *, method: str = "POST", path: str = "/embed", headers: Headers = ()
    ) -> None:
        self.registry = CollectorRegistry()
        self.sent: list[Message] = []
        self._app = RequestMiddleware(app, Metrics(self.registry, ("/embed",)), frozenset({"/healthz"}))
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": list(headers),
            "route": Route,
        }

    async def _receive(self) -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    async def call(self) -> None:
        await self._app(self.scope, self._receive, self._send)

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.sent[1]["body"])["error"]
        return error

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"vision_sidecar_{name}", labels)


def run(app: ASGIApp, *, method: str = "POST", path: str = "/embed", headers: Headers = ()) -> Run:
    done = Run(app, method=method, path=path, headers=headers)
    asyncio.run(done.call())
    return done


def raising(error: BaseException) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    return app


async def fine(scope: Scope, receive: Receive, send: Send) -> None:
    context_of(scope).stages_s["read"] = 0.0015
    await Response(b"body", media_type="text/plain")(scope, receive, send)


@pytest.mark.parametrize(
    "app", [fine, raising(BadRequest("no", code="invalid_image")), raising(KeyError("x"))]
)
def test_every_answer_has_the_fixed_headers(app: ASGIApp) -> None:
    headers = run(app).headers
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["vary"] == "Accept"
    assert re.fullmatch(r"[0-9a-f]{32}", headers["x-request-id"])
    assert re.search(r"total;dur=\d+\.\d\d$", headers["server-timing"])


def test_the_scope_gets_one_object_and_no_cycle() -> None:
    done = run(fine)
    added = set(done.scope) - {"type", "method", "path", "headers", "route"}
    assert added == {"vision_sidecar.context"}
    context = context_of(done.scope)
    assert (context.status, context.response_has_begun, context.error_code) == (200, True, None)
    assert done.scope not in gc.get_referents(context)


@pytest.mark.usefixtures("no_collection")
def test_a_request_is_freed_without_garbage_collection() -> None:
    class Body:
        """An object that the scope refers to."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["body"] = bodies.pop()
        raise BadRequest("no", code="invalid_image")

    bodies = [Body()]
    body = weakref.ref(bodies[0])
    run(app)
    assert body() is None


def test_stages_are_in_milliseconds() -> None:
    assert run(fine).headers["server-timing"].startswith("read;dur=1.50, total;dur=")


@pytest.mark.parametrize("sent", ["a", "Ab-1._", "x" * 128])
def test_the_callers_request_id_comes_back(sent: str) -> None:
    assert run(fine, headers=[(b"x-request-id", sent.encode())]).headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", [b"", b"a b", b"x" * 129, b"a\r\nb: c", b"a\n", b"\xff", b"a/b"])
def test_invalid_request_id_is_replaced(sent: bytes) -> None:
    assert re.fullmatch(r"[0-9a-f]{32}", run(fine, headers=[(b"x-request-id", sent)]).headers["x-request-id"])


def test_an_api_error_becomes_the_error_body() -> None:
    done = run(raising(BadRequest("not an image", code="invalid_image", param="images[1]")))
    assert done.status == 400
    assert done.headers["content-type"] == "application/json"
    assert int(done.headers["content-length"]) == len(done.sent[1]["body"])
    assert done.error == {
        "message": "not an image",
        "type": "invalid_request_error",
        "param": "images[1]",
        "code": "invalid_image",
    }
    assert done.metric("errors_total", code="invalid_image") == 1
    assert done.metric("requests_total", route="/embed", status="400") == 1


def test_errors_may_hold_any_text() -> None:
    done = run(raising(BadRequest("\ud800", code="invalid_option", param="\udfff\n")))
    assert done.status == 400
    assert (done.error["message"], done.error["param"]) == ("\ud800", "\udfff\n")
    assert done.sent[1]["body"].isascii()


def test_unexpected_error_is_logged_with_the_id_and_hidden_from_the_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = run(raising(OSError("/secret/path")), headers=[(b"x-request-id", b"id-7")])
    assert (done.status, done.error["code"]) == (500, "internal_error")
    assert b"secret" not in done.sent[1]["body"]
    [record] = caplog.records
    assert (record.levelname, record.getMessage()) == ("ERROR", "POST /embed [id-7] failed")
    assert record.exc_info is not None
    assert record.__dict__["request_id"] == "id-7"


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (BadRequest("no", code="invalid_image"), logging.INFO),
        (TooManyRequests("no", code="queue_full", retry_after_s=1), logging.INFO),
        (Unavailable("no"), logging.INFO),
        (Unavailable("no", code="draining"), logging.INFO),
        (Unavailable("no", code="device_failed"), logging.INFO),
        (DeadlineExceeded(), logging.INFO),
        (NonFiniteOutput("no"), logging.ERROR),
        (InternalError("no"), logging.ERROR),
    ],
)
def test_a_refused_or_failed_request_is_one_line(
    error: ApiError, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "service")
    run(raising(error), headers=[(b"x-request-id", b"id-7")])
    [record] = caplog.records
    assert record.levelno == level
    assert record.getMessage() == f"POST /embed [id-7]: {error.status} {error.code}: {error.message}"
    members = {name: getattr(record, name) for name in ("request_id", "method", "route", "status", "code")}
    assert members == {
        "request_id": "id-7",
        "method": "POST",
        "route": "/embed",
        "status": error.status,
        "code": error.code,
    }


def test_a_normal_request_is_not_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "service")
    run(fine)
    assert caplog.records == []


def test_the_cause_of_an_error_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    error = InternalError("the encoder failed on this image")
    error.__cause__ = RuntimeError("odd shape")
    done = run(raising(error))
    [record] = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is error.__cause__
    assert b"odd shape" not in done.sent[1]["body"]


def test_only_2xx_answers_are_timed() -> None:
    done = run(fine)
    assert done.metric("requests_total", route="/embed", status="200") == 1
    assert done.metric("request_duration_seconds_count", route="/embed") == 1
    assert done.metric("stage_duration_seconds_sum", stage="read") == 0.0015
    assert done.metric("stage_duration_seconds_count", stage="decode") == 0
    refused = run(raising(BadRequest("no", code="invalid_image")))
    assert refused.metric("request_duration_seconds_count", route="/embed") == 0


def test_request_of_a_caller_that_left_is_counted_as_499(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "service")
    done = run(raising(ClientDisconnect()), headers=[(b"x-request-id", b"id-7")])
    assert done.sent == []
    assert [record.getMessage() for record in caplog.records] == ["POST /embed [id-7]: the caller left"]
    assert [(r.__dict__["status"], r.__dict__["code"]) for r in caplog.records] == [(499, None)]
    assert done.metric("requests_total", route="/embed", status="499") == 1


def test_probes_are_answered_but_neither_counted_nor_logged(caplog: pytest.LogCaptureFixture) -> None:
    done = run(raising(NonFiniteOutput("x")), path="/healthz")
    assert done.status == 500
    assert "x-request-id" in done.headers
    assert done.metric("requests_total", route="/embed", status="500") == 0
    assert done.metric("errors_total", code="non_finite_output") == 0
    assert caplog.records == []


def test_a_path_without_a_route_is_counted_as_other() -> None:
    done = Run(fine, path="/nope")
    del done.scope["route"]
    asyncio.run(done.call())
    assert done.metric("requests_total", route="other", status="200") == 1


def test_answer_given_before_the_router_is_counted_by_its_path() -> None:
    done = Run(raising(Unauthorized("no")))
    del done.scope["route"]
    asyncio.run(done.call())
    assert done.metric("requests_total", route="/embed", status="401") == 1
    assert done.metric("errors_total", code="invalid_api_key") == 1


def test_requests_in_flight_go_up_and_down() -> None:
    seen: list[float | None] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(done.metric("requests_in_flight"))
        raise ValueError

    done = Run(app)
    asyncio.run(done.call())
    assert (seen, done.metric("requests_in_flight")) == ([1], 0)


def test_head_is_answered_like_get_without_the_body() -> None:
    methods = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        methods.append(Request(scope).method)
        await fine(scope, receive, send)

    done = run(app, method="HEAD")
    assert methods == ["GET"]
    assert done.headers["content-length"] == "4"
    assert b"".join(message["body"] for message in done.sent[1:]) == b""


def test_request_cut_off_at_shutdown_is_answered_503(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "service")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    done = Run(app)

    async def cancel() -> None:
        task = asyncio.create_task(done.call())
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(cancel())
    assert (done.status, done.error["code"], done.headers["retry-after"]) == (503, "draining", "5")
    assert ["503 draining" in record.getMessage() for record in caplog.records] == [True]


def test_error_after_the_answer_began_is_raised_to_the_server() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("late")

    done = Run(app)
    with pytest.raises(ValueError, match="late"):
        asyncio.run(done.call())
    assert len(done.sent) == 1


def test_other_scopes_than_requests_pass_through() -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    done = Run(app)
    done.scope["type"] = "lifespan"
    asyncio.run(done.call())
    assert seen == ["lifespan"]

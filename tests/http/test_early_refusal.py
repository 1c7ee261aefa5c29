"""Early refusals: the middleware alone, and its place in the app."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from service.config.settings import Settings
from service.errors import TooManyRequests
from service.http.early_refusal import EarlyRefusalMiddleware
from service.queue.ticket import Ticket
from tests.support.answers import error_of
from tests.support.app import Service, only

ORIGIN = "https://pages.example.org"
PATHS = ("/embed", "/v1/embeddings")
Serve = Callable[..., Service]


class Calls:
    """The names of the steps that ran, in order."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.order: list[str] = []
        self._refusal = refusal

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.order.append("app")

    def check(self) -> None:
        self.order.append("check")
        if self._refusal is not None:
            raise self._refusal

    def run(self, **scope: Any) -> list[str]:
        async def receive() -> Message:
            raise AssertionError("read")

        async def send(message: Message) -> None:
            raise AssertionError("answered")

        guard = EarlyRefusalMiddleware(self.app, PATHS, self.check)
        asyncio.run(guard({"type": "http", **scope}, receive, send))
        return self.order


@pytest.mark.parametrize("path", PATHS)
def test_a_guarded_path_is_checked_before_the_app_runs(path: str) -> None:
    assert Calls().run(path=path) == ["check", "app"]


@pytest.mark.parametrize("path", ["/", "/embed/", "/embeddings", "/v1/embeddings/x", "/metrics", "/readyz"])
def test_other_paths_are_not_checked(path: str) -> None:
    assert Calls().run(path=path) == ["app"]


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
def test_other_scopes_than_requests_are_not_checked(kind: str) -> None:
    assert Calls().run(type=kind, path="/embed") == ["app"]


def test_the_app_does_not_run_for_a_refused_request() -> None:
    calls = Calls(TooManyRequests("full", code="queue_full", retry_after_s=1))
    with pytest.raises(TooManyRequests):
        calls.run(path="/embed")
    assert calls.order == ["check"]


@pytest.fixture
def fill(serve: Serve, settings: Settings) -> Iterator[Callable[..., Service]]:
    """Starts apps whose queue is full until the test ends."""
    filled: list[tuple[Service, Ticket]] = []

    def start(**changes: object) -> Service:
        service = serve(only(settings, **changes))
        batcher = service.engine.batcher

        async def reserve() -> Ticket:
            ticket = Ticket()
            batcher.reserve(ticket, batcher.limit_tokens)
            return ticket

        filled.append((service, service.runner.run(reserve())))
        return service

    yield start
    for service, ticket in filled:
        service.engine.batcher.cancel(ticket)


def post_unread(service: Service, path: str, **headers: str) -> httpx.Response:
    """Posts a body that fails the test if it is read."""

    async def body() -> AsyncIterator[bytes]:
        raise AssertionError("read")
        yield b""

    return service.request("POST", path, content=body(), headers={"content-type": "image/png", **headers})


@pytest.mark.parametrize("path", PATHS)
def test_a_refusal_has_the_common_headers_and_is_counted_under_its_route(
    path: str, fill: Callable[..., Service]
) -> None:
    full = fill()
    response = post_unread(full, path, **{"x-request-id": "mine"})
    assert error_of(response) == (429, "queue_full", None)
    assert 1 <= int(response.headers["retry-after"]) <= 10
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["vary"] == "Accept"
    assert "total;dur=" in response.headers["server-timing"]
    assert full.metric("requests_total", route=path, status="429") == 1
    assert full.metric("errors_total", code="queue_full") == 1
    assert full.metric("requests_in_flight") == 0
    assert full.encoder.batches == []


def test_a_full_server_still_answers_on_other_routes(fill: Callable[..., Service]) -> None:
    full = fill()
    for path in ("/readyz", "/healthz", "/info", "/v1/models", "/metrics"):
        assert full.get(path).status_code == 200, path


def test_a_caller_without_a_key_does_not_learn_that_the_server_is_full(fill: Callable[..., Service]) -> None:
    full = fill(api_keys="sk-1")
    for path in PATHS:
        assert error_of(post_unread(full, path)) == (401, "invalid_api_key", None)
        known = post_unread(full, path, authorization="Bearer sk-1")
        assert error_of(known) == (429, "queue_full", None)


def test_a_page_may_read_a_refusal(fill: Callable[..., Service]) -> None:
    full = fill(cors_allow_origins=[ORIGIN])
    response = post_unread(full, "/embed", origin=ORIGIN)
    assert error_of(response) == (429, "queue_full", None)
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "Retry-After" in response.headers["access-control-expose-headers"]
    asking = {"origin": ORIGIN, "access-control-request-method": "POST"}
    assert full.request("OPTIONS", "/embed", headers=asking).status_code == 200

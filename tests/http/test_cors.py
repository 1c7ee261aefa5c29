"""Cross-origin requests, through the whole app."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from service.config.settings import Settings
from tests.support.answers import error_of
from tests.support.app import FakeEncoder, Service, encode_image, only

ORIGIN = "https://pages.example.org"
Serve = Callable[..., Service]


@pytest.fixture
def shared(serve: Serve, settings: Settings) -> Service:
    """The app with one allowed origin and an API key."""
    return serve(only(settings, cors_allow_origins=[ORIGIN], api_keys="sk-1"))


def preflight(service: Service, origin: str = ORIGIN, method: str = "POST", **headers: str) -> httpx.Response:
    asking = {"origin": origin, "access-control-request-method": method}
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return service.request("OPTIONS", "/embed", headers=asking | named)


def has_fixed_headers(response: httpx.Response) -> bool:
    headers = response.headers
    assert "Accept" in headers["vary"]
    return bool(headers["x-request-id"] and headers["server-timing"]) and (
        (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff")
    )


def test_a_preflight_needs_no_key(shared: Service) -> None:
    response = preflight(shared, access_control_request_headers="authorization,content-type,x-any")
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "authorization" in response.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in response.headers
    assert has_fixed_headers(response)
    assert shared.metric("requests_total", route="/embed", status="200") == 1


@pytest.mark.parametrize(
    ("origin", "method"),
    [
        ("https://evil.example", "POST"),
        ("null", "POST"),
        ("http://pages.example.org", "POST"),
        ("https://pages.example.org.evil.example", "POST"),
        (ORIGIN, "DELETE"),
    ],
)
def test_a_refused_preflight_allows_nothing(origin: str, method: str, shared: Service) -> None:
    response = preflight(shared, origin, method)
    assert (response.status_code, response.content) == (200, b"")
    assert not [name for name in response.headers if name.startswith("access-control-allow")]
    assert has_fixed_headers(response)


@pytest.mark.parametrize("origins", [[ORIGIN], "*"])
def test_an_allowed_origin_may_call_a_server_on_a_private_network(
    origins: object, serve: Serve, settings: Settings
) -> None:
    service = serve(only(settings, cors_allow_origins=origins))
    response = preflight(
        service,
        access_control_request_private_network="true",
        access_control_request_headers="authorization",
    )
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] in (ORIGIN, "*")
    assert response.headers["access-control-allow-private-network"] == "true"
    assert response.headers["access-control-allow-headers"] == "authorization"
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "Access-Control-Request-Private-Network" in response.headers["vary"]
    assert has_fixed_headers(response)


def test_private_network_permission_is_given_only_on_request(shared: Service) -> None:
    assert "access-control-allow-private-network" not in preflight(shared).headers


def test_a_foreign_origin_gets_no_private_network_permission(shared: Service) -> None:
    response = preflight(shared, "https://evil.example", access_control_request_private_network="true")
    assert (response.status_code, response.content) == (200, b"")
    assert not [name for name in response.headers if name.startswith("access-control-allow")]


def test_answers_can_be_read_by_the_origin(shared: Service) -> None:
    response = shared.embed(encode_image(), origin=ORIGIN, authorization="Bearer sk-1")
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert response.headers["access-control-expose-headers"] == "X-Request-Id, Server-Timing, Retry-After"
    assert "Origin" in response.headers["vary"]
    assert has_fixed_headers(response)


def test_errors_can_be_read_by_the_origin(shared: Service) -> None:
    refused = shared.embed(encode_image(), origin=ORIGIN)
    assert error_of(refused)[0] == 401
    broken = shared.embed(b"no image", origin=ORIGIN, authorization="Bearer sk-1")
    assert error_of(broken) == (400, "invalid_image", "images[0]")
    unknown = shared.get("/nope", headers={"origin": ORIGIN, "authorization": "Bearer sk-1"})
    assert error_of(unknown)[0] == 404
    shared.engine.drain()
    draining = shared.embed(encode_image(), origin=ORIGIN, authorization="Bearer sk-1")
    assert error_of(draining)[0] == 503
    probe = shared.get("/readyz", headers={"origin": ORIGIN})
    assert error_of(probe)[0] == 503
    for response in (refused, broken, unknown, draining, probe):
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "Retry-After" in response.headers["access-control-expose-headers"]
        assert has_fixed_headers(response)


def test_an_unexpected_error_can_be_read_by_the_origin(serve: Serve, settings: Settings) -> None:
    def fail(items: object) -> None:
        raise RuntimeError

    service = serve(only(settings, cors_allow_origins=[ORIGIN]), encoders=[FakeEncoder(fail)])
    response = service.embed(encode_image(), origin=ORIGIN)
    assert error_of(response)[0] == 500
    assert response.headers["access-control-allow-origin"] == ORIGIN


def test_foreign_origins_get_no_permission(shared: Service) -> None:
    response = shared.embed(encode_image(), origin="https://evil.example", authorization="Bearer sk-1")
    assert "access-control-allow-origin" not in response.headers
    assert has_fixed_headers(response)


def test_star_allows_every_origin(serve: Serve, settings: Settings) -> None:
    service = serve(only(settings, cors_allow_origins="*"))
    response = service.embed(encode_image(), origin="https://any.example")
    assert response.headers["access-control-allow-origin"] == "*"
    assert preflight(service, "null").headers["access-control-allow-origin"] == "*"


def test_without_allowed_origins_there_are_no_cors_headers(service: Service) -> None:
    response = service.embed(encode_image(), origin=ORIGIN)
    assert not [name for name in response.headers if name.startswith("access-control")]
    assert response.headers["vary"] == "Accept"
    assert error_of(preflight(service)) == (405, "method_not_allowed", None)

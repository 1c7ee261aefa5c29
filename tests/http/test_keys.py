"""API keys, through the whole app."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from service.app import OPEN_PATHS
from service.config.settings import Settings
from service.routes import probes
from tests.support.answers import error_of, message_of
from tests.support.app import Service, encode_image, only

KEYS = {"api_keys": "sk-first,sk-second"}
Serve = Callable[..., Service]


@pytest.fixture
def locked(serve: Serve, settings: Settings) -> Service:
    """The app with API keys."""
    return serve(only(settings, **KEYS))


@pytest.mark.parametrize(
    "authorization", ["Bearer sk-first", "Bearer sk-second", "bearer sk-first", "BEARER   sk-first "]
)
def test_every_key_is_accepted(authorization: str, locked: Service) -> None:
    assert locked.embed(encode_image(), authorization=authorization).status_code == 200
    assert locked.get("/info", headers={"authorization": authorization}).status_code == 200


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer sk",
        "Bearer sk-firstx",
        "Bearer SK-FIRST",
        "Bearer sk-first,sk-second",
        "Basic sk-first",
        "sk-first",
        "Bearersk-first",
        "Bearer sk-first x",
        "Bearer: sk-first",
        "Bearer é",
    ],
)
def test_other_authorization_is_401(authorization: str, locked: Service) -> None:
    headers = {"content-type": "image/png", "authorization": authorization.encode("latin-1")}
    response = locked.request("POST", "/embed", content=encode_image(), headers=headers)
    assert error_of(response) == (401, "invalid_api_key", None)
    assert response.headers["www-authenticate"] == "Bearer"
    assert "sk-" not in response.text
    assert locked.encoder.batches == []
    assert locked.metric("errors_total", code="invalid_api_key") == 1
    assert locked.metric("requests_total", route="/embed", status="401") == 1


def test_401_has_the_common_headers(locked: Service) -> None:
    response = locked.embed(encode_image(), x_request_id="mine")
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["vary"] == "Accept"
    assert "total;dur=" in response.headers["server-timing"]
    assert "Authorization: Bearer" in message_of(response)


def test_two_authorization_headers_are_refused(locked: Service) -> None:
    headers = [("authorization", "Bearer sk-first"), ("authorization", "Bearer sk-second")]
    assert locked.get("/info", headers=httpx.Headers(headers)).status_code == 401


def test_a_body_is_not_read_without_a_key(locked: Service) -> None:
    async def body() -> AsyncIterator[bytes]:
        raise AssertionError("read")
        yield b""

    response = locked.request("POST", "/embed", content=body(), headers={"content-type": "image/png"})
    assert error_of(response) == (401, "invalid_api_key", None)


def test_only_probes_metrics_docs_and_the_page_need_no_key(locked: Service) -> None:
    assert {*probes.PATHS, "/metrics", "/docs", "/openapi.json"} < set(OPEN_PATHS)
    for path in OPEN_PATHS:
        assert locked.get(path).status_code == 200
        assert locked.request("HEAD", path).status_code == 200
    paths = ("/embed", "/info", "/v1/models", "/page", "/nope", "/docs/", "//docs", "/Docs", "/docs/../info")
    for path in paths:
        for method in ("GET", "POST", "OPTIONS"):
            assert locked.request(method, f"http://sidecar{path}").status_code == 401, path


def test_without_keys_in_the_settings_no_key_is_needed(service: Service) -> None:
    assert service.embed(encode_image(), authorization="Bearer x").status_code == 200
    schema = service.get("/openapi.json").json()
    assert "securitySchemes" not in schema["components"]
    assert "security" not in schema["paths"]["/embed"]["post"]


def test_openapi_says_where_a_key_is_needed(locked: Service) -> None:
    schema = locked.get("/openapi.json").json()
    assert schema["components"]["securitySchemes"] == {"api_key": {"type": "http", "scheme": "bearer"}}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            is_open = path in OPEN_PATHS
            assert operation.get("security") == (None if is_open else [{"api_key": []}]), path
            assert ("401" in operation["responses"]) is not is_open


def test_keys_are_not_logged(locked: Service, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    locked.embed(encode_image(), authorization="Bearer sk-wrong")
    locked.embed(b"no image", authorization="Bearer sk-first")
    assert "sk-" not in caplog.text

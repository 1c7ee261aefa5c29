"""`/docs` and `/openapi.json`: the page, its assets and the description."""

from __future__ import annotations

import re

import httpx
import pytest
from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import ERROR_CODES
from service.intake.options import MEDIA_TYPES, OPTION_NAMES
from service.routes import docs
from service.routes.openapi import STATUS_TEXTS
from tests.support.app import Service


def test_docs_come_with_their_own_assets(service: Service) -> None:
    page = service.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    addresses = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(addresses) == 4
    for address in addresses:
        if not address.startswith("data:"):
            assert "//" not in address
            asset = service.get(f"/{address}")
            assert asset.status_code == 200
            assert asset.headers["content-type"].startswith(
                "text/css" if address.endswith("css") else "text/javascript"
            )
    assert not re.search(r"<script>|<style| on\w+=", page.text)


def behind_prefix(app: ASGIApp, prefix: str) -> ASGIApp:
    """A proxy that serves `app` under a prefix, which it strips. Other paths are 404."""

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith(f"{prefix}/"):
            await Response(status_code=404)(scope, receive, send)
            return
        path = scope["path"].removeprefix(prefix)
        await app({**scope, "path": path, "raw_path": path.encode()}, receive, send)

    return proxy


@pytest.mark.parametrize("prefix", ["", "/images", "/team/images"])
def test_docs_reach_their_server_behind_a_proxy_that_strips_a_prefix(prefix: str, service: Service) -> None:
    async def try_it_out() -> None:
        transport = httpx.ASGITransport(behind_prefix(service.app, prefix))
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
            page = await client.get(f"{prefix}/docs")
            for address in re.findall(r'(?:src|href)="(?!data:)([^"]+)"', page.text):
                assert (await client.get(page.url.join(address))).status_code == 200
            start = await client.get(page.url.join("docs/start.js"))
            [description_url] = re.findall(r'url: "([^"]+)"', start.text)
            description = await client.get(page.url.join(description_url))
            [server] = description.json()["servers"]
            # As Swagger UI does: https://spec.openapis.org/oas/v3.1.0#server-object
            base = str(description.url.join(server["url"])).removesuffix("/")
            for path in ("/healthz", "/info", "/v1/models"):
                assert (await client.get(f"{base}{path}")).status_code == 200

    service.runner.run(try_it_out())


def test_openapi_describes_every_route_option_and_error(service: Service) -> None:
    schema = service.get("/openapi.json").json()
    assert set(schema["paths"]) == {
        "/embed", "/v1/embeddings", "/healthz", "/readyz", "/health", "/info", "/v1/models",
        "/v1/models/{model_id}", "/metrics", "/docs", "/openapi.json",
    }  # fmt: skip
    embed = schema["paths"]["/embed"]["post"]
    assert {parameter["name"] for parameter in embed["parameters"]} == set(OPTION_NAMES)
    content = embed["requestBody"]["content"]
    assert set(content) == {"image/*", "application/octet-stream", "multipart/form-data", "application/json"}
    for media_type in ("multipart/form-data", "application/json"):
        assert set(content[media_type]["schema"]["properties"]) == {"images", *OPTION_NAMES}
    items = content["application/json"]["schema"]["properties"]["images"]["oneOf"][0]["items"]["oneOf"]
    assert [set(item.get("properties", ())) for item in items] == [set(), {"data"}, {"url"}]
    assert set(embed["responses"]["200"]["content"]) == set(MEDIA_TYPES)
    openai = schema["paths"]["/v1/embeddings"]["post"]
    assert set(openai["requestBody"]["content"]["application/json"]["schema"]["properties"]) == {
        "model", "input", "encoding_format", "dimensions"
    }  # fmt: skip
    assert "422" not in openai["responses"]
    assert set(embed["responses"]) == {
        *("200", "400", "406", "408", "413", "415", "422", "429", "431", "500", "502", "503", "504"),
    }
    assert set(schema["components"]["schemas"]["ErrorDetail"]["properties"]["code"]["enum"]) == set(
        ERROR_CODES
    )
    operations = [operation for path in schema["paths"].values() for operation in path.values()]
    assert all(operation["summary"] for operation in operations)
    statuses = {status for operation in operations for status in operation["responses"]}
    assert {str(status) for status in STATUS_TEXTS} == statuses - {"200"}


def test_docs_are_made_at_start_and_not_at_a_request(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> bytes:
        raise AssertionError("made at a request")

    monkeypatch.setattr(docs, "_read_asset", fail)
    monkeypatch.setattr(service.app, "openapi", fail)
    for path in docs.PATHS:
        assert service.get(path).status_code == 200


def test_examples_of_openapi_work(service: Service) -> None:
    schema = service.get("/openapi.json").json()
    for path in ("/embed", "/v1/embeddings"):
        content = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        for shown in content["examples"].values():
            assert service.request("POST", path, json=shown["value"]).status_code == 200

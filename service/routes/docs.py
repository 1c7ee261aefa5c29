"""`/openapi.json`, and `/docs`: Swagger UI with its own assets, so that it works without other hosts."""

from __future__ import annotations

from collections.abc import Collection
from importlib.resources import files

import orjson
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse

from service.http.keys import describe_keys

PAGE = "/docs"
OPENAPI = "/openapi.json"
ASSETS = {  # path → media type and file name, in the package that contains Swagger UI
    "/docs/swagger-ui.css": ("text/css", "swagger-ui.css"),
    "/docs/swagger-ui-bundle.js": ("text/javascript", "swagger-ui-bundle.js"),
}
START = "/docs/start.js"
PATHS = (PAGE, OPENAPI, *ASSETS, START)
# Relative to `/openapi.json`, so that "Try it out" works behind a proxy that strips a prefix.
SERVER = "."

# The addresses in the page are relative for the same reason.
_HTML = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>vision-sidecar</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
_START_JS = 'SwaggerUIBundle({url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true});\n'

# Swagger UI writes style elements into the page and keeps its icons in data: URLs.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add_routes(router: APIRouter, app: FastAPI, *, needs_key: bool, open_paths: Collection[str]) -> None:
    """Adds the routes of the docs. Call it last: it describes the routes that the app has by then.

    All bodies are created here, none at a request.
    """
    assets = {path: (media_type, _read_asset(name)) for path, (media_type, name) in ASSETS.items()}

    async def describe(request: Request) -> Response:
        return Response(description, media_type="application/json")

    async def page(request: Request) -> Response:
        return HTMLResponse(_HTML, headers={"Content-Security-Policy": _POLICY})

    async def asset(request: Request) -> Response:
        media_type, content = assets[request.scope["path"]]
        return Response(content, media_type=media_type)

    async def start(request: Request) -> Response:
        return Response(_START_JS, media_type="text/javascript")

    router.add_api_route(PAGE, page, summary="This page", response_class=HTMLResponse, tags=["docs"])
    router.add_api_route(OPENAPI, describe, summary="The OpenAPI description", tags=["docs"])
    router.add_api_route(START, start, include_in_schema=False)
    for path in ASSETS:
        router.add_api_route(path, asset, include_in_schema=False)
    openapi = app.openapi()
    if needs_key:
        describe_keys(openapi, open_paths)
    description = orjson.dumps(openapi)


def _read_asset(name: str) -> bytes:
    return (files("fastapi_offline") / "static" / name).read_bytes()

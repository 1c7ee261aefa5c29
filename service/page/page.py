"""`/`: the page, and its files below `/page/`. All are read at start."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Request, Response

PATH = "/"
_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_SCRIPTS = ("main", "api", "tensors", "worker", "map", "matrix", "panel", "snippets")
_FILES = ("style.css", *(f"{name}.js" for name in _SCRIPTS))
PATHS = (PATH, *(f"/page/{name}" for name in _FILES))
# Previews of images are blob: URLs. Nothing is loaded from another host.
_POLICY = (
    "default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add_routes(router: APIRouter) -> None:
    """Adds the page. It holds no data, so it needs no API key; what it asks for does."""
    for path in PATHS:
        _add_file(router, path, "index.html" if path == PATH else path.rpartition("/")[2])


def _add_file(router: APIRouter, path: str, name: str) -> None:
    body = (files("service.page") / "static" / name).read_bytes()
    media_type = _MEDIA_TYPES[name.rpartition(".")[2]]

    async def file(request: Request) -> Response:
        return Response(body, media_type=media_type, headers={"content-security-policy": _POLICY})

    router.add_api_route(path, file, include_in_schema=False)

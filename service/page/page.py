"""`/`: the page, and its files below `/page/`. All are read at start."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Request, Response

from service.errors import NotFound

PATH = "/"
FILE = "/page/{name}"  # one route, so that the metrics count all files together
ROUTES = (PATH, FILE)
_INDEX = "index.html"
_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_NAMES = tuple(sorted(file.name for file in (files("service.page") / "static").iterdir()))
PATHS = (PATH, *(f"/page/{name}" for name in _NAMES if name != _INDEX))
# Pictures are blob: URLs of the files that were chosen. Nothing is loaded from another host.
_POLICY = (
    "default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add_routes(router: APIRouter) -> None:
    """Adds the page. It holds no data, so it needs no API key; what it asks for does."""
    bodies = {name: (files("service.page") / "static" / name).read_bytes() for name in _NAMES}

    async def index(request: Request) -> Response:
        return _response(_INDEX, bodies[_INDEX])

    async def file(request: Request) -> Response:
        name: str = request.path_params["name"]
        if name == _INDEX or name not in bodies:
            raise NotFound("there is no such path; /docs lists the paths")
        return _response(name, bodies[name])

    router.add_api_route(PATH, index, include_in_schema=False)
    router.add_api_route(FILE, file, include_in_schema=False)


def _response(name: str, body: bytes) -> Response:
    media_type = _MEDIA_TYPES[name.rpartition(".")[2]]
    return Response(body, media_type=media_type, headers={"content-security-policy": _POLICY})

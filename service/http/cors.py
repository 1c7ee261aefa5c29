"""Pages of other origins: what a browser is told, on answers and on errors alike.

Knows the headers of the Fetch standard; nothing of routes or keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp


class Cors(CORSMiddleware):
    """Allows `origins` to read every answer. A preflight is answered here, and so needs no key."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Server-Timing", "Retry-After"),
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """No page may read a refusal, so it is an answer that allows nothing, and no error."""
        response = super().preflight_response(request_headers)
        return response if response.status_code == 200 else Response(headers={"Vary": "Origin"})

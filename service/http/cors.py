"""Cross-origin requests: headers that let pages of other origins call the server and read its answers.

Knows the headers of the Fetch standard; knows nothing of routes or keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp


class Cors(CORSMiddleware):
    """Allows pages of `origins` to read every answer. Preflights are answered here, so they need no key.

    A page of an allowed origin may also call a server on a private network: with Private Network Access a
    browser asks for that permission in the preflight, and blocks the call unless it is given.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=("X-Request-Id", "Server-Timing", "Retry-After"),
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """A refused preflight gets 200 without any permission: no page could read an error body."""
        response = super().preflight_response(request_headers)
        return response if response.status_code == 200 else Response(headers={"Vary": "Origin"})

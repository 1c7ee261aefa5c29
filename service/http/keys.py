"""API keys, checked before a body is read.

Knows the Authorization header and paths; knows nothing of the rest of a request.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import Unauthorized


class KeyMiddleware:
    """Passes on requests with one of `keys`, and requests to `open_paths`.

    Raises `Unauthorized` for all others.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], open_paths: Collection[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            self._check([value for name, value in scope["headers"] if name == b"authorization"])
        await self._app(scope, receive, send)

    def _check(self, headers: list[bytes]) -> None:
        if not headers:
            raise Unauthorized("this server needs an API key: send it as Authorization: Bearer KEY")
        scheme, _, key = headers[0].partition(b" ")
        given = _digest(key.strip())
        # All digests have the same length and all are compared, so the time reveals nothing about the keys.
        is_known = sum(hmac.compare_digest(given, digest) for digest in self._digests) > 0
        if len(headers) > 1 or scheme.lower() != b"bearer" or not is_known:
            raise Unauthorized("the API key is not one of this server's")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def describe_keys(openapi: dict[str, Any], open_paths: Collection[str]) -> None:
    """Adds to an OpenAPI description which paths need a key and how it is sent."""
    openapi["components"]["securitySchemes"] = {"api_key": {"type": "http", "scheme": "bearer"}}
    refusal = {
        "description": "The API key is missing or not one of this server's",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}},
    }
    for path, operations in openapi["paths"].items():
        if path not in open_paths:
            for operation in operations.values():
                operation["security"] = [{"api_key": []}]
                operation["responses"]["401"] = refusal

"""The headers and the error body that all responses share, those of the app and those of the HTTP protocol.

Knows nothing of how they are sent.
"""

from __future__ import annotations

import json
import uuid

from service.errors import ApiError

Headers = list[tuple[bytes, bytes]]

FIXED_HEADERS: Headers = [
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"vary", b"Accept"),
]


class ResponseCutOff(Exception):
    """A response that has begun cannot be completed. The connection is closed, so that the client sees it."""


def new_request_id() -> str:
    """An id for a request without a valid one."""
    return uuid.uuid4().hex


def identity_headers(request_id: str, timings_ms: dict[str, float], *, is_cached: bool = False) -> Headers:
    """`X-Request-Id` and `Server-Timing`. `is_cached`: nothing was encoded for the request."""
    timings = ", ".join(f"{name};dur={duration:.2f}" for name, duration in timings_ms.items())
    if is_cached:
        timings = f"cache;desc=hit, {timings}"
    return [(b"x-request-id", request_id.encode()), (b"server-timing", timings.encode())]


def error_response(error: ApiError) -> tuple[Headers, bytes]:
    """The headers and the body of an error. JSON escapes to ASCII, so a message may have any character."""
    body = json.dumps(error.body(), separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers().items()]
    return headers, body

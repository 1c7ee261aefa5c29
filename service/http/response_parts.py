"""What all answers have in common, whether the app gives them or the protocol below it.

Knows headers and the error body; knows nothing of how they are sent.
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


def new_request_id() -> str:
    """An id for a request that came with none."""
    return uuid.uuid4().hex


def identity_headers(request_id: str, timings_ms: dict[str, float]) -> Headers:
    """`X-Request-Id` and `Server-Timing`."""
    timings = ", ".join(f"{name};dur={duration:.2f}" for name, duration in timings_ms.items())
    return [(b"x-request-id", request_id.encode()), (b"server-timing", timings.encode())]


def error_response(error: ApiError) -> tuple[Headers, bytes]:
    """The headers of an error's own, and its body. Text of any kind can be sent: JSON escapes it to ASCII."""
    body = json.dumps(error.body(), separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers().items()]
    return headers, body

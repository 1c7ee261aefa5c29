"""Which headers of a request and of its answer are passed on. Knows nothing of their values."""

from __future__ import annotations

from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]

# Of one connection, not of the message. Source: RFC 9110, section 7.6.1.
_HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"proxy-authenticate", b"proxy-authorization", b"proxy-authentication-info", b"proxy-connection"),
    }
)
# This server writes its own, or decides about them.
_NOT_SENT = _HOP_BY_HOP | {
    *(b"host", b"content-length", b"expect", b"accept-encoding", b"authorization", b"x-request-id"),
}
_NOT_RETURNED = _HOP_BY_HOP | {
    *(b"date", b"server", b"cache-control", b"vary", b"x-content-type-options", b"x-request-id"),
    b"server-timing",
}


def request_headers(
    given: Iterable[tuple[bytes, bytes]], request_id: str, *, passes_authorization: bool
) -> Headers:
    """The headers for the LLM server, without Host, Content-Length and a key of this server's own.

    The answer is asked for without compression, which would hold back the pieces of a stream.
    """
    headers = [(name.lower(), value) for name, value in given]
    not_sent = _NOT_SENT - {b"authorization"} if passes_authorization else _NOT_SENT
    dropped = not_sent | _named_by_connection(headers)
    kept = [(name, value) for name, value in headers if name not in dropped]
    return [*kept, (b"accept-encoding", b"identity"), (b"x-request-id", request_id.encode())]


def answer_headers(given: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers of an answer for the client. CORS is decided by this server."""
    headers = [(name.lower(), value) for name, value in given]
    dropped = _NOT_RETURNED | _named_by_connection(headers)
    return [
        (name, value)
        for name, value in headers
        if name not in dropped and not name.startswith(b"access-control-")
    ]


def _named_by_connection(headers: Headers) -> set[bytes]:
    values = [value for name, value in headers if name == b"connection"]
    return {token.strip().lower() for value in values for token in value.split(b",")}

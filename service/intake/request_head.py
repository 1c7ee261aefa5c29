"""The head of a request, parsed once: the headers and the query that say how its body is to be read.

Knows how headers are written; knows nothing of which values are served.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.datastructures import Headers

from service.errors import BadRequest
from service.intake.content_type import ContentType, parse_content_type

# More digits than any number of bytes has would cost time to convert.
_MAX_LENGTH_DIGITS = 19


@dataclass(frozen=True)
class RequestHead:
    """What precedes the body. None stands for a missing header."""

    content_type: ContentType | None = None
    content_length: int | None = None  # of the body, in bytes
    content_encoding: str = "identity"  # in lower case
    accept: str | None = None
    query: bytes = b""


def parse_head(headers: Headers, query: bytes) -> RequestHead:
    """Raises `BadRequest` for a malformed `Content-Length`, `HeadersTooLarge` for a long `Content-Type`."""
    return RequestHead(
        content_type=parse_content_type(headers.get("content-type")),
        content_length=_parse_length(headers.get("content-length")),
        content_encoding=headers.get("content-encoding", "identity").lower(),
        accept=", ".join(headers.getlist("accept")) or None,
        query=query,
    )


def _parse_length(header: str | None) -> int | None:
    if header is None:
        return None
    if not (header.isascii() and header.isdigit()) or len(header) > _MAX_LENGTH_DIGITS:
        raise BadRequest("the Content-Length header is not a number of bytes", code="invalid_body")
    return int(header)

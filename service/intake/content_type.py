"""The `Content-Type` header. Knows nothing of which types are served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from python_multipart.multipart import parse_options_header

from service.errors import HeadersTooLarge

# The library takes about a microsecond for each semicolon.
MAX_CHARS = 1024


@dataclass(frozen=True)
class ContentType:
    """A media type, in lower case, and its parameters by lower-case name."""

    media_type: bytes
    parameters: Mapping[bytes, bytes]


def is_image_type(media_type: bytes) -> bool:
    """Whether this is the type of an image, or of bytes of any kind."""
    return media_type.startswith(b"image/") or media_type == b"application/octet-stream"


def parse_content_type(header: str | None) -> ContentType | None:
    """Returns None if the header is missing or empty. Raises `HeadersTooLarge` over `MAX_CHARS`."""
    if not header:
        return None
    if len(header) > MAX_CHARS:
        raise HeadersTooLarge(f"the Content-Type header has more than the {MAX_CHARS} characters allowed")
    # Headers are latin-1; the library fails over other characters.
    return ContentType(*parse_options_header(header.encode("latin-1", "replace")))

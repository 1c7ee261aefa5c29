"""Chooses the form of an answer by the `Accept` header of a request.

Knows media types and q-values; knows nothing of options or of how an answer is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from service.errors import HeadersTooLarge, NotAcceptable

# A real header has about 200 characters. Parsing takes up to a microsecond for each.
MAX_ACCEPT_CHARS = 4096

T = TypeVar("T")


def negotiate(accept: str | None, served: Mapping[str, T]) -> T:
    """Returns the form that an `Accept` header prefers among `served` (media type → form).

    Without a header, and among forms of equal weight, the first of `served` is returned. Raises
    `NotAcceptable` (406) if the header allows none of them and `HeadersTooLarge` (431) if it has more than
    `MAX_ACCEPT_CHARS` characters. Source: RFC 9110, section 12.5.1.
    """
    if not accept or accept == "*/*":
        return next(iter(served.values()))
    if len(accept) > MAX_ACCEPT_CHARS:
        raise HeadersTooLarge(f"the Accept header has more than the {MAX_ACCEPT_CHARS} characters allowed")
    ranges = _accept_ranges(accept)
    best: T | None = None
    best_quality = 0.0
    for media_type, form in served.items():
        quality = _quality(media_type, ranges)
        if quality > best_quality:
            best, best_quality = form, quality
    if best is None:
        raise NotAcceptable(f"this route answers {', '.join(served)}; the Accept header allows none of these")
    return best


def _accept_ranges(accept: str) -> dict[str, float]:
    """Media range → q-value. A range is left out if its q-value is not a number from 0 to 1."""
    ranges: dict[str, float] = {}
    for part in accept.lower().split(","):
        media_range, *parameters = (piece.strip() for piece in part.split(";"))
        weights = [text[2:].strip() for text in parameters if text.startswith("q=")]
        try:
            quality = float(weights[0]) if weights else 1.0
        except ValueError:
            continue
        if media_range and 0.0 <= quality <= 1.0:
            ranges[media_range] = quality
    return ranges


def _quality(media_type: str, ranges: Mapping[str, float]) -> float:
    """The q-value of a media type, by the most specific range that matches it."""
    for media_range in (media_type, f"{media_type.partition('/')[0]}/*", "*/*"):
        if media_range in ranges:
            return ranges[media_range]
    return 0.0

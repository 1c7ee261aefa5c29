"""Reading a body within its limits: the three forms of `POST /embed`, and the JSON of `POST /v1/embeddings`.

Knows content types, sizes and time; knows nothing of pixels, of the values of options or of HTTP frameworks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from service.errors import BadRequest, BodyTimeout, TooLarge, UnsupportedMedia
from service.intake.content_type import ContentType, is_image_type
from service.intake.embed_body import (
    BodyLimits,
    BodyReader,
    EmbedBody,
    RunBlocking,
    image_too_large,
    join_images,
)
from service.intake.json_body import JsonReader, parse_json_body
from service.intake.multipart import MultipartReader
from service.intake.openai_body import ServedModel, parse_openai_body

T = TypeVar("T")

_SERVED_TYPES = "image/*, application/octet-stream, multipart/form-data and application/json"
_HINT = "for one image send its bytes: curl --data-binary @photo.jpg -H 'Content-Type: image/jpeg' URL"

# The parser of forms takes about 10 ms for this many bytes of a body that is all half boundaries.
_SLICE_BYTES = 2**16


def embed_reader(content_type: ContentType | None, limits: BodyLimits) -> BodyReader[EmbedBody]:
    """The reader for a body of `/embed`.

    Raises `UnsupportedMedia` for other content types, `BadRequest` if a form has no boundary.
    """
    if content_type is None:
        raise _unsupported("the Content-Type header is missing")
    media_type = content_type.media_type
    if is_image_type(media_type):
        return RawReader(limits)
    if media_type == b"multipart/form-data":
        return MultipartReader(content_type.parameters.get(b"boundary", b""), limits)
    if media_type == b"application/json":
        return JsonReader(parse_json_body, limits)
    shown = media_type[:100].decode("ascii", "backslashreplace")
    if media_type == b"application/x-www-form-urlencoded":
        raise _unsupported(f"a form of type {shown} holds no image")
    raise _unsupported(f"the content type {shown or 'given'} is not served")


def openai_reader(
    content_type: ContentType | None, limits: BodyLimits, served: ServedModel
) -> BodyReader[EmbedBody]:
    """The reader for a body of `/v1/embeddings`. Raises `UnsupportedMedia` if it is not JSON."""
    if content_type is None or content_type.media_type != b"application/json":
        raise UnsupportedMedia(
            "the body must be JSON, with the Content-Type application/json", code="unsupported_content_type"
        )
    return JsonReader(parse_openai_body, limits, served)


def takes_options(content_type: ContentType | None) -> bool:
    """Whether a body of this content type may hold options beside images."""
    return content_type is not None and content_type.media_type in (
        b"multipart/form-data",
        b"application/json",
    )


def check_length(content_length: int | None, limits: BodyLimits) -> None:
    """Raises `TooLarge` if the announced number of bytes is over the limit. None: it was not announced."""
    if content_length is not None and content_length > limits.max_body_bytes:
        raise _body_too_large(limits)


async def read_body(
    reader: BodyReader[T], chunks: AsyncIterator[bytes], limits: BodyLimits, run_blocking: RunBlocking
) -> T:
    """Feeds the chunks of a body to its reader, within limits on bytes and time.

    `run_blocking` takes work on large bodies off the event loop. Raises `ApiError`. An error of `chunks`, for
    example because the caller left, passes through.
    """
    num_bytes = 0
    try:
        async with asyncio.timeout(limits.timeout_s) as timeout:
            async for chunk in chunks:
                num_bytes += len(chunk)
                if num_bytes > limits.max_body_bytes:
                    raise _body_too_large(limits)
                await _feed(reader, chunk)
    except TimeoutError:
        if not timeout.expired():
            raise
        raise BodyTimeout(f"the body did not arrive within {limits.timeout_s:g} s") from None
    if num_bytes == 0:
        raise BadRequest("the body is empty", code="empty_input")
    return await reader.finish(run_blocking)


async def _feed(reader: BodyReader[object], chunk: bytes) -> None:
    """Yields to the event loop between slices: some bytes take a hundred times as long as others."""
    reader.feed(chunk[:_SLICE_BYTES])
    for start in range(_SLICE_BYTES, len(chunk), _SLICE_BYTES):
        await asyncio.sleep(0)
        reader.feed(chunk[start : start + _SLICE_BYTES])


class RawReader:
    """Reads a body that is the file of one image."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._chunks: list[bytes] = []
        self._num_bytes = 0

    def feed(self, chunk: bytes) -> None:
        self._num_bytes += len(chunk)
        if self._num_bytes > self._limits.max_image_bytes:
            raise image_too_large(self._limits, 0)
        self._chunks.append(chunk)

    async def finish(self, run_blocking: RunBlocking) -> EmbedBody:
        return EmbedBody(await join_images([self._chunks], run_blocking), {})


def _unsupported(problem: str) -> UnsupportedMedia:
    return UnsupportedMedia(
        f"{problem}; served are {_SERVED_TYPES}; {_HINT}", code="unsupported_content_type"
    )


def _body_too_large(limits: BodyLimits) -> TooLarge:
    return TooLarge(
        f"the body has more than the {limits.max_body_bytes} bytes allowed", code="body_too_large"
    )

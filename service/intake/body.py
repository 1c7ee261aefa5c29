"""Reading a body within its limits: of `POST /embed` in its three forms, of `POST /v1/embeddings` in its one.

Knows content types, sizes and time; knows nothing of what an image is, of the values of options or of HTTP
frameworks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from service.errors import BadRequest, BodyTimeout, TooLarge, UnsupportedMedia
from service.intake.content_type import ContentType, is_image_type
from service.intake.embed_body import (
    BodyForm,
    BodyLimits,
    EmbedBody,
    RunBlocking,
    image_too_large,
    join_images,
)
from service.intake.json_body import JsonReader, parse_json_body
from service.intake.multipart import MultipartReader
from service.intake.openai_body import ServedModel, parse_openai_body

_SERVED_TYPES = "image/*, application/octet-stream, multipart/form-data and application/json"
_HINT = "for one image send its bytes: curl --data-binary @photo.jpg -H 'Content-Type: image/jpeg' URL"

# Of a body that is all half boundaries, the parser of forms takes this many in about 10 ms.
_SLICE_BYTES = 2**16


async def read_embed_body(
    content_type: ContentType | None,
    content_length: str | None,
    chunks: AsyncIterator[bytes],
    limits: BodyLimits,
    run_blocking: RunBlocking,
) -> EmbedBody:
    """Reads a body of `/embed` as its content type says.

    `run_blocking` is used for large bodies only. Nothing is read where the two headers tell already that
    the body will be refused. Raises `ApiError`; what `chunks` raises, such as that the client left, passes
    through.
    """
    return await _read(_form(content_type, limits), content_length, chunks, limits, run_blocking)


async def read_openai_body(
    content_type: ContentType | None,
    content_length: str | None,
    chunks: AsyncIterator[bytes],
    limits: BodyLimits,
    run_blocking: RunBlocking,
    served: ServedModel,
) -> EmbedBody:
    """Reads a body of `/v1/embeddings`, which is JSON. As `read_embed_body` otherwise."""
    if content_type is None or content_type.media_type != b"application/json":
        raise UnsupportedMedia(
            "the body must be JSON, with the Content-Type application/json", code="unsupported_content_type"
        )
    return await _read(
        JsonReader(parse_openai_body, limits, served), content_length, chunks, limits, run_blocking
    )


async def _read(
    form: BodyForm,
    content_length: str | None,
    chunks: AsyncIterator[bytes],
    limits: BodyLimits,
    run_blocking: RunBlocking,
) -> EmbedBody:
    _check_length(content_length, limits)
    num_bytes = 0
    try:
        async with asyncio.timeout(limits.timeout_s) as timeout:
            async for chunk in chunks:
                num_bytes += len(chunk)
                if num_bytes > limits.max_body_bytes:
                    raise _body_too_large(limits)
                await _feed(form, chunk)
    except TimeoutError:
        if not timeout.expired():
            raise
        raise BodyTimeout(f"the body did not arrive within {limits.timeout_s:g} s") from None
    if num_bytes == 0:
        raise BadRequest("the body is empty", code="empty_input")
    return await form.finish(run_blocking)


async def _feed(form: BodyForm, chunk: bytes) -> None:
    """Lets others have the event loop between slices: some bytes take a hundred times as long as others."""
    form.feed(chunk[:_SLICE_BYTES])
    for start in range(_SLICE_BYTES, len(chunk), _SLICE_BYTES):
        await asyncio.sleep(0)
        form.feed(chunk[start : start + _SLICE_BYTES])


def takes_options(content_type: ContentType | None) -> bool:
    """Whether a body of this content type may hold options beside images."""
    return content_type is not None and content_type.media_type in (
        b"multipart/form-data",
        b"application/json",
    )


def _form(content_type: ContentType | None, limits: BodyLimits) -> BodyForm:
    """The reader for a content type. Raises `UnsupportedMedia`; `BadRequest` where a boundary is missing."""
    if content_type is None:
        raise _unsupported("the Content-Type header is missing")
    media_type = content_type.media_type
    if is_image_type(media_type):
        return RawForm(limits)
    if media_type == b"multipart/form-data":
        return MultipartReader(content_type.parameters.get(b"boundary", b""), limits)
    if media_type == b"application/json":
        return JsonReader(parse_json_body, limits)
    shown = media_type[:100].decode("ascii", "backslashreplace")
    if media_type == b"application/x-www-form-urlencoded":
        raise _unsupported(f"a form of type {shown} holds no image")
    raise _unsupported(f"the content type {shown or 'given'} is not served")


def _unsupported(problem: str) -> UnsupportedMedia:
    return UnsupportedMedia(
        f"{problem}; served are {_SERVED_TYPES}; {_HINT}", code="unsupported_content_type"
    )


def announced_bytes(content_length: str) -> int | None:
    """What a Content-Length says; None where it is no number, or has too many digits to be one of bytes."""
    # Many digits would cost time to convert, and the check on the running total comes anyway.
    is_number = content_length.isascii() and content_length.isdigit() and len(content_length) < 20
    return int(content_length) if is_number else None


def _check_length(content_length: str | None, limits: BodyLimits) -> None:
    if content_length is None:
        return
    num_bytes = announced_bytes(content_length)
    if num_bytes is None:
        raise BadRequest("the Content-Length header is not a number of bytes", code="invalid_body")
    if num_bytes > limits.max_body_bytes:
        raise _body_too_large(limits)


def _body_too_large(limits: BodyLimits) -> TooLarge:
    return TooLarge(
        f"the body has more than the {limits.max_body_bytes} bytes allowed", code="body_too_large"
    )


class RawForm:
    """The body is the file of one image."""

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

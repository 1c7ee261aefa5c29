"""What a body with images holds, whatever its form: its limits, and the errors that all forms share.

Knows nothing of the forms.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, TypeVarTuple

from service.errors import BadRequest, TooLarge, image_param
from service.fetching.image_urls import ImageUrl
from service.intake.content_type import ContentType

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True)
class BodyLimits:
    """What a body may be at most. All of it is enforced while the body arrives."""

    max_body_bytes: int
    max_image_bytes: int  # of one image, as it stands in its file
    max_images: int
    timeout_s: float  # for the whole body to arrive


@dataclass(frozen=True)
class EmbedBody:
    """The images of a request, each its bytes or its URL, and its options as sent, not validated."""

    images: tuple[bytes | ImageUrl, ...]  # at least one, none of them empty
    options: Mapping[str, str | bool]  # by name


class RunBlocking(Protocol):
    """Runs a function off the event loop, such as in a thread pool."""

    def __call__(self, fn: Callable[[*Ts], T], /, *args: *Ts) -> Awaitable[T]: ...


class ReadBody(Protocol):
    """Reads a body by its content type, its content length and its chunks."""

    def __call__(
        self,
        content_type: ContentType | None,
        content_length: str | None,
        chunks: AsyncIterator[bytes],
        limits: BodyLimits,
        run_blocking: RunBlocking,
    ) -> Awaitable[EmbedBody]: ...


# A hop to another thread costs as much as copying this many bytes.
_MAX_JOINED_INLINE_BYTES = 2**20


class BodyForm(Protocol):
    """Takes one body in, in one of its forms. Made for one request."""

    def feed(self, chunk: bytes) -> None:
        """Takes the next bytes. Raises `ApiError` as soon as a limit is passed."""

    async def finish(self, run_blocking: RunBlocking) -> EmbedBody:
        """Says what the body held. Raises `ApiError`."""


def image_too_large(limits: BodyLimits, index: int) -> TooLarge:
    """An image passed its limit while it arrived, so its size is not known."""
    message = f"the image has more than the {limits.max_image_bytes} bytes allowed"
    return TooLarge(message, code="image_too_large", param=image_param(index))


def too_many_images(limits: BodyLimits) -> TooLarge:
    """The body holds more images than one request may."""
    message = f"the request has more than the {limits.max_images} images allowed"
    return TooLarge(message, code="too_many_images", param="images")


async def join_images(
    images: Sequence[Sequence[bytes]], run_blocking: RunBlocking
) -> tuple[bytes | ImageUrl, ...]:
    """Images out of their chunks, joined off the event loop where they are large, and checked."""
    if sum(len(chunk) for chunks in images for chunk in chunks) > _MAX_JOINED_INLINE_BYTES:
        return check_images(await run_blocking(_join_each, images))
    return check_images(_join_each(images))


def _join_each(images: Sequence[Sequence[bytes]]) -> list[bytes]:
    return [b"".join(chunks) for chunks in images]


def check_images(images: Sequence[bytes | ImageUrl]) -> tuple[bytes | ImageUrl, ...]:
    """The images of a body that has been read. Raises `BadRequest` where there is none or one is empty."""
    if not images:
        raise BadRequest("the request holds no image", code="empty_input", param="images")
    for index, image in enumerate(images):
        if not image:
            raise BadRequest("the image is empty", code="empty_input", param=image_param(index))
    return tuple(images)

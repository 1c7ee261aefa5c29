"""A body with images, whatever its form: its limits, and the checks and errors that all forms share.

Knows nothing of the forms.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, TypeVarTuple

from service.errors import BadRequest, TooLarge, image_param
from service.fetching.image_urls import ImageUrl

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Body = TypeVar("Body", covariant=True)

Images = tuple[bytes | ImageUrl, ...]  # of one request: the bytes or the URL of each


@dataclass(frozen=True)
class BodyLimits:
    """Upper limits on a body. All of them are enforced while the body arrives."""

    max_body_bytes: int
    max_image_bytes: int  # of one image, as it stands in its file
    max_images: int
    timeout_s: float  # for the whole body to arrive


@dataclass(frozen=True)
class EmbedBody:
    """The images of a request, and its options as they were sent: not checked, without defaults."""

    images: Images  # at least one, none of them empty
    options: Mapping[str, str | bool]  # by name


class RunBlocking(Protocol):
    """Runs a function off the event loop, such as in a thread pool."""

    def __call__(self, fn: Callable[[*Ts], T], /, *args: *Ts) -> Awaitable[T]: ...


# A hop to another thread costs as much as copying this many bytes.
_MAX_JOINED_INLINE_BYTES = 2**20


class BodyReader(Protocol[Body]):
    """Reads one body of one form. Created for one request."""

    def feed(self, chunk: bytes) -> None:
        """Takes the next bytes. Raises `ApiError` as soon as a limit is passed."""

    async def finish(self, run_blocking: RunBlocking) -> Body:
        """Returns the content of the body, which has ended. Raises `ApiError`."""


def image_too_large(limits: BodyLimits, index: int) -> TooLarge:
    """The error for an image that passed its limit while it arrived, so that its size is not known."""
    message = f"the image has more than the {limits.max_image_bytes} bytes allowed"
    return TooLarge(message, code="image_too_large", param=image_param(index))


def too_many_images(limits: BodyLimits) -> TooLarge:
    """The error for a body with more images than one request may have."""
    message = f"the request has more than the {limits.max_images} images allowed"
    return TooLarge(message, code="too_many_images", param="images")


async def join_images(images: Sequence[Sequence[bytes]], run_blocking: RunBlocking) -> Images:
    """Joins the chunks of each image, off the event loop if they are large. Raises as `check_images` does."""
    if sum(len(chunk) for chunks in images for chunk in chunks) > _MAX_JOINED_INLINE_BYTES:
        return check_images(await run_blocking(_join_each, images))
    return check_images(_join_each(images))


def _join_each(images: Sequence[Sequence[bytes]]) -> list[bytes]:
    return [b"".join(chunks) for chunks in images]


def check_images(images: Sequence[bytes | ImageUrl]) -> Images:
    """Returns the images of a body. Raises `BadRequest` if there is none, or one is empty."""
    if not images:
        raise BadRequest("the request holds no image", code="empty_input", param="images")
    for index, image in enumerate(images):
        if not image:
            raise BadRequest("the image is empty", code="empty_input", param=image_param(index))
    return tuple(images)

"""Takes the images of a request from their bytes to the queue, in the decode threads.

    headers checked ─► tokens reserved ─► decoded and resized ─► queued

The event loop starts a preparation. For one small JPEG or PNG it also checks the header, which is quicker
than a hop to another thread. Knows images and their limits; nothing of HTTP.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from models import AspectRatioError, EncodeItem, TokenSink
from service.answers.answer import ImageFacts
from service.answers.answer_options import AnswerOptions
from service.engine.interfaces import LoadedEncoder
from service.errors import ApiError, BadRequest, TooLarge, image_param
from service.images.decoding_memory import DecodingMemory
from service.images.image_file import ImageHeader, ImageLimits, read_header
from service.queue.batcher import Batcher
from service.queue.ticket import Ticket
from service.queue.tracebacks import without_traceback

_QUICK_BYTES = 2**16
_QUICK_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG")


@dataclass(frozen=True)
class PreparationResources:
    """What the preparations of all requests share."""

    batcher: Batcher
    executor: Executor
    limits: ImageLimits
    max_tokens: int  # of one request
    memory: DecodingMemory


@dataclass(frozen=True)
class HashedImage:
    """One image as it came: the bytes of its file, and their SHA-256 in hex."""

    file: bytes
    sha256: str


class Destination(Protocol):
    """Where the tokens of a request's images go, in place of its answer."""

    def reserve(self, num_tokens: Sequence[int]) -> None:
        """Reserves room for the tokens of all images. Raises `ApiError`."""

    def sink(self, index: int, facts: ImageFacts) -> TokenSink:
        """The destination of one image."""


class Preparation:
    """Prepares the images of one request. Once the request has ended, the remaining steps are skipped."""

    def __init__(
        self,
        resources: PreparationResources,
        images: Sequence[HashedImage],
        options: AnswerOptions,
        ticket: Ticket,
        encoder: LoadedEncoder,
        destination: Destination | None = None,
    ) -> None:
        """With a `destination`, the ticket's embeddings are the results of sinks."""
        self._resources = resources
        self._destination = destination
        self._images = list(images)
        self._headers: list[ImageHeader] = []
        self._options = options
        self._output = options.output_spec()
        self._ticket = ticket
        self._encoder = encoder
        self._lock = threading.Lock()
        self._num_pending = len(images)
        self._num_tokens: list[int] = []  # of each image, computed from its header
        self._items: list[EncodeItem | None] = [None] * len(images)
        self._facts: list[ImageFacts | None] = [None] * len(images)
        self._first_broken = len(images)
        self._error: Exception | None = None  # the error of the first broken image

    @property
    def facts(self) -> list[ImageFacts]:
        """What the answer says about each image, once all images are queued."""
        return [facts for facts in self._facts if facts is not None]

    def start(self) -> None:
        """Returns at once. Raises the errors of a small file itself; other errors end the ticket."""
        is_quick = len(self._images) == 1 and _is_quick_to_check(self._images[0].file)
        if is_quick and self._destination is None:
            self.check_headers()
            self._resources.executor.submit(self.decode, 0)
        else:
            self._resources.executor.submit(self.run)

    def drop(self) -> None:
        """Releases files and pixels. Threads that have not started with them do nothing."""
        self._images.clear()
        self._headers.clear()
        self._items.clear()
        self._resources.memory.look_again()

    def run(self) -> None:
        """Runs all steps. Several images are decoded in parallel, the first of them in this thread."""
        try:
            if self._ticket.ended:
                return
            self.check_headers()
            for index in range(1, self._num_pending):
                self._resources.executor.submit(self.decode, index)
            self.decode(0)
        except Exception as error:
            self._resources.batcher.fail(self._ticket, without_traceback(error))

    def check_headers(self) -> None:
        """Checks every limit by the headers and reserves the tokens, before any pixel is decoded."""
        resources, encoder = self._resources, self._encoder
        total = 0
        for index, image in enumerate(self._images):
            with _naming_image(index):
                header = read_header(image.file, resources.limits)
                num_tokens = encoder.preprocessor.num_tokens(header.height, header.width)
                total += num_tokens
                if total > resources.max_tokens:
                    raise TooLarge(
                        f"the images up to this one make {total} tokens, and a request may have "
                        f"{resources.max_tokens}",
                        code="too_many_tokens",
                    )
            self._headers.append(header)
            self._num_tokens.append(num_tokens)
        self._options.check_size(
            num_images=len(self._headers),
            num_tokens=total,
            hidden_size=encoder.hidden_size,
            width=encoder.width,
        )
        if self._destination is not None:
            self._destination.reserve(self._num_tokens)
        resources.batcher.reserve(self._ticket, total)

    def decode(self, index: int) -> None:
        """Decodes one image. The last call queues all images, or fails the request."""
        error: Exception | None = None
        try:
            if self._is_wanted(index):
                self._prepare(index)
        except Exception as raised:
            error = without_traceback(raised)
        with self._lock:
            if error is not None and index < self._first_broken:
                self._first_broken, self._error = index, error
            self._num_pending -= 1
            is_last = not self._num_pending
        if is_last:
            self._finish()

    def _is_wanted(self, index: int) -> bool:
        return not self._ticket.ended and index < self._first_broken

    def _finish(self) -> None:
        batcher = self._resources.batcher
        if self._error is not None:
            batcher.fail(self._ticket, self._error)
            self._error = None
            return
        try:
            batcher.put(self._ticket, [item for item in self._items if item is not None])
        except Exception as error:  # the executor would swallow it, and the request would never end
            batcher.fail(self._ticket, without_traceback(error))

    def _prepare(self, index: int) -> None:
        image, header, num_tokens = self._images[index], self._headers[index], self._num_tokens[index]
        preprocessor = self._encoder.preprocessor
        num_bytes = _peak_bytes(header, num_tokens * preprocessor.config.factor**2)
        with self._resources.memory.room(num_bytes, lambda: self._is_wanted(index)) as has_room:
            if not has_room:
                return
            with _naming_image(index):
                patches = preprocessor(header.decode())
        assert patches.num_tokens == num_tokens, f"{patches.num_tokens} tokens, not {num_tokens}"
        facts = ImageFacts(
            num_tokens=patches.num_tokens,
            grid_thw=patches.grid_thw,
            width=header.width,
            height=header.height,
            sha256=image.sha256,
        )
        sink = None if self._destination is None else self._destination.sink(index, facts)
        self._facts[index] = facts
        self._items[index] = EncodeItem(patches, self._output, sink)


def _peak_bytes(header: ImageHeader, resized_pixels: int) -> int:
    """The peak of decoding, or of resizing: the image, its rows in the new width, and the result twice."""
    num_pixels = header.width * header.height
    between = math.isqrt(num_pixels * resized_pixels)
    return max(header.decoding_bytes, 3 * (num_pixels + between + 2 * resized_pixels))


def _is_quick_to_check(image: bytes) -> bool:
    """Whether reading the header takes less time than handing it to another thread."""
    return len(image) <= _QUICK_BYTES and image.startswith(_QUICK_SIGNATURES)


@contextmanager
def _naming_image(index: int) -> Iterator[None]:
    """Adds the index of the image to an error."""
    param = image_param(index)
    try:
        yield
    except ApiError as error:
        error.param = error.param or param
        raise
    except AspectRatioError as error:
        raise BadRequest(str(error), code="invalid_aspect_ratio", param=param) from None

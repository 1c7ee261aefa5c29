"""From the bytes of a request's images to their place in the queue, in the decode threads.

    headers checked ─► admitted ─► decoded and resized ─► queued

The event loop only starts it: from its end on, the queue has the request. Knows images and their limits;
nothing of HTTP.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass

from models import AspectRatioError, EncodeItem
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
class Preparer:
    """What all requests share."""

    batcher: Batcher
    executor: Executor
    limits: ImageLimits
    max_tokens: int  # of one request
    memory: DecodingMemory


class Preparation:
    """The images of one request. A step is left out once the request has ended."""

    def __init__(
        self,
        shared: Preparer,
        images: Sequence[bytes],
        options: AnswerOptions,
        ticket: Ticket,
        encoder: LoadedEncoder,
    ) -> None:
        self._shared = shared
        self._images = list(images)
        self._headers: list[ImageHeader] = []
        self._options = options
        self._output = options.output_spec()
        self._ticket = ticket
        self._encoder = encoder
        self._lock = threading.Lock()
        self._missing = len(images)
        self._num_tokens: list[int] = []  # of the images, as their headers say
        self._items: list[EncodeItem | None] = [None] * len(images)
        self._facts: list[ImageFacts | None] = [None] * len(images)
        self._first_broken = len(images)
        self._error: Exception | None = None  # of that image

    @property
    def facts(self) -> list[ImageFacts]:
        """What the answer says of each image, once all are queued."""
        return [facts for facts in self._facts if facts is not None]

    def start(self) -> None:
        """Returns at once. The ticket ends with what goes wrong, unless it is raised here already."""
        if len(self._images) == 1 and _is_quick_to_check(self._images[0]):
            self.admit()
            self._shared.executor.submit(self.decode, 0)
        else:
            self._shared.executor.submit(self.run)

    def drop(self) -> None:
        """Lets go of files and pixels. A thread that has not come to them yet finds nothing to do."""
        self._images.clear()
        self._headers.clear()
        self._items.clear()
        self._shared.memory.look_again()

    def run(self) -> None:
        """All of it for a single image; of several, each is decoded on its own, in parallel."""
        try:
            if self._ticket.ended:
                return
            self.admit()
            for index in range(1, self._missing):
                self._shared.executor.submit(self.decode, index)
            self.decode(0)
        except Exception as error:
            self._shared.batcher.fail(self._ticket, without_traceback(error))

    def admit(self) -> None:
        """Reads the headers, checks every limit before any pixel is decoded, and has the request admitted."""
        shared, encoder = self._shared, self._encoder
        total = 0
        for index, image in enumerate(self._images):
            with _blaming(index):
                header = read_header(image, shared.limits)
                num_tokens = encoder.preprocessor.num_tokens(header.height, header.width)
                total += num_tokens
                if total > shared.max_tokens:
                    raise TooLarge(
                        f"the images up to this one make {total} tokens, and a request may have "
                        f"{shared.max_tokens}",
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
        shared.batcher.reserve(self._ticket, total)

    def decode(self, index: int) -> None:
        """One image. Whoever is last queues them all, or ends the request with its first broken image."""
        error: Exception | None = None
        try:
            if self._is_wanted(index):
                self._prepare(index)
        except Exception as raised:
            error = without_traceback(raised)
        with self._lock:
            if error is not None and index < self._first_broken:
                self._first_broken, self._error = index, error
            self._missing -= 1
            is_last = not self._missing
        if is_last:
            self._finish()

    def _is_wanted(self, index: int) -> bool:
        return not self._ticket.ended and index < self._first_broken

    def _finish(self) -> None:
        batcher = self._shared.batcher
        if self._error is not None:
            batcher.fail(self._ticket, self._error)
            self._error = None
            return
        try:
            batcher.put(self._ticket, [item for item in self._items if item is not None])
        except Exception as error:  # the executor would keep it, and the request wait for its deadline
            batcher.fail(self._ticket, without_traceback(error))

    def _prepare(self, index: int) -> None:
        image, header, admitted = self._images[index], self._headers[index], self._num_tokens[index]
        preprocessor = self._encoder.preprocessor
        num_bytes = _peak_bytes(header, admitted * preprocessor.config.factor**2)
        with self._shared.memory.room(num_bytes, lambda: self._is_wanted(index)) as has_room:
            if not has_room:
                return
            with _blaming(index):
                patches = preprocessor(header.decode())
        assert patches.num_tokens == admitted, f"{patches.num_tokens} tokens, and {admitted} were admitted"
        self._facts[index] = ImageFacts(
            num_tokens=patches.num_tokens,
            grid_thw=patches.grid_thw,
            width=header.width,
            height=header.height,
            sha256=hashlib.sha256(image).hexdigest(),
        )
        self._items[index] = EncodeItem(patches, self._output)


def _peak_bytes(header: ImageHeader, resized_pixels: int) -> int:
    """Of decoding, or of resizing: the image, its rows in their new width, and the result twice."""
    num_pixels = header.width * header.height
    between = math.isqrt(num_pixels * resized_pixels)
    return max(header.decoding_bytes, 3 * (num_pixels + between + 2 * resized_pixels))


def _is_quick_to_check(image: bytes) -> bool:
    """Whether its header is read in less time than a hop to another thread takes."""
    return len(image) <= _QUICK_BYTES and image.startswith(_QUICK_SIGNATURES)


@contextmanager
def _blaming(index: int) -> Iterator[None]:
    """Says in an error which image it is about."""
    param = image_param(index)
    try:
        yield
    except ApiError as error:
        error.param = error.param or param
        raise
    except AspectRatioError as error:
        raise BadRequest(str(error), code="invalid_aspect_ratio", param=param) from None

"""The policy of the queue as plain data: admission by tokens, order, batches, deadlines, retries, losses.

There is no lock, no thread and no clock here: `Batcher` holds the lock, wakes the waiting threads and passes
the time, in seconds of `time.perf_counter()`. First in, first out. Images wait while the device is busy; as
soon as the device has room for a batch, it takes the waiting images. Knows tokens, tickets and devices;
nothing of HTTP, image files or the encoder.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Sequence

from models import BatchResult, EncodeItem
from service.errors import (
    ApiError,
    DeadlineExceeded,
    InternalError,
    TooLarge,
    TooManyRequests,
    Unavailable,
    image_param,
)
from service.queue.queue_records import DeviceRecord, QueuedImage, QueueLimits, TakenBatch
from service.queue.tally import Tally
from service.queue.ticket import Ticket

logger = logging.getLogger(__name__)

_MIN_RETRY_AFTER_S, _MAX_RETRY_AFTER_S = 1, 10


class QueueState:
    """What waits, what runs, and how many tokens are reserved.

    `reserved` counts the tokens that were reserved and that no device has taken yet. API servers that share
    one limit share this tally.
    """

    def __init__(self, limits: QueueLimits, reserved: Tally) -> None:
        self.limits = limits
        self.devices: dict[str, DeviceRecord] = {}
        self.waiting: OrderedDict[QueuedImage, None] = OrderedDict()
        self.waiting_tokens = 0
        self.is_closed = False
        self.has_lost_all = False  # there were devices, and all of them are lost
        self._reserved = reserved
        self._requests: dict[Ticket, list[QueuedImage]] = {}  # queued, and not ended yet
        self._ended: list[Ticket] = []  # whose coroutines are still to be woken
        self._numbers = itertools.count()

    @property
    def reserved_tokens(self) -> int:
        """Reserved here, and not taken by a device yet."""
        return self._reserved.own

    @property
    def limit_tokens(self) -> int:
        return self.limits.max_queue_tokens * max(1, len(self.devices))

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.waiting and not any(device.batches for device in self.devices.values())

    # Requests

    def check_room(self) -> None:
        """Raises `TooManyRequests` if not one more token could be reserved."""
        if self._reserved.total >= self.limit_tokens:
            raise self._full()

    def reserve(self, ticket: Ticket, num_tokens: int) -> None:
        """Reserves the tokens of all images of a request, or none.

        Raises `TooManyRequests` while they do not fit, `TooLarge` if they never could, and `Unavailable` once
        no device is left.
        """
        if num_tokens > self.limit_tokens:
            raise TooLarge(
                f"the images make {num_tokens} tokens, and the queue holds {self.limit_tokens}",
                code="too_many_tokens",
            )
        if self.has_lost_all:
            raise _device_failed()
        if self._reserved.total + num_tokens > self.limit_tokens:
            raise self._full()
        if not ticket.ended:
            self._reserved.own += num_tokens
            ticket.reserved_tokens = num_tokens

    def put(self, ticket: Ticket, items: Sequence[EncodeItem], now: float) -> None:
        """Queues the images of a request whose tokens are reserved, unless the request has ended."""
        if ticket.ended:
            return
        if self.has_lost_all:
            self.end(ticket, _device_failed())
            return
        ticket.queued(len(items), now)
        images = [QueuedImage(ticket, index, item) for index, item in enumerate(items)]
        self._requests[ticket] = images
        for image in images:
            self.waiting[image] = None
            self.waiting_tokens += image.num_tokens

    def end(self, ticket: Ticket, error: Exception) -> None:
        """Ends a request with an error, unless it has ended. Its images that still wait are dropped."""
        if ticket.ended:
            return
        for image in self._requests.pop(ticket, ()):
            if image in self.waiting:
                self._remove(image)
        self._reserved.own -= ticket.reserved_tokens
        ticket.failed(error)
        self._ended.append(ticket)

    def pop_ended(self) -> list[Ticket]:
        """The requests that have ended since the last call. The caller wakes their coroutines."""
        ended = self._ended
        if ended:
            self._ended = []
        return ended

    # Devices

    def add_device(self, name: str) -> None:
        """Adds a device that will take batches. The limit of the queue grows by the share of one device."""
        self.devices[name] = DeviceRecord()
        self.has_lost_all = False

    def is_serving(self, name: str) -> bool:
        """Whether a device may still take batches."""
        return not (self.is_closed or self.devices[name].is_lost)

    def due_in_s(self, now: float) -> float | None:
        """In how many seconds a batch may be taken; 0 if at once; None if nothing waits.

        A batch that is not full waits `max_wait_s` for more images.
        """
        if not self.waiting:
            return None
        if self.waiting_tokens >= self.limits.max_batch_tokens:
            return 0.0
        queued_at = next(iter(self.waiting)).ticket.queued_at
        assert queued_at is not None, "a waiting image has been queued"
        return max(0.0, queued_at + self.limits.max_wait_s - now)

    def num_idle_others(self, name: str) -> int:
        """How many devices other than this one are idle."""
        return sum(device.is_idle for other, device in self.devices.items() if other != name)

    def leaves_to_others(self, name: str) -> bool:
        """Whether the device is busy while another one is idle, which is to take the next batch."""
        return bool(self.devices[name].batches) and self.num_idle_others(name) > 0

    def take(self, name: str, num_idle_others: int, now: float) -> TakenBatch | None:
        """The device's share of what waits. None if nothing waits, or all of it is past its deadline.

        `num_idle_others` idle devices get equal shares. Requests past their deadline are ended on the way.
        """
        share = math.ceil(self.waiting_tokens / (1 + num_idle_others))
        images = self._pop(min(self.limits.max_batch_tokens, share), now)
        if not images:
            return None
        batch = TakenBatch(next(self._numbers), images)
        self.devices[name].started(batch, now)
        return batch

    def finish_batch(self, name: str, number: int, result: BatchResult, now: float) -> None:
        """A device has encoded a batch: its embeddings go to the requests that are still there."""
        if self.devices[name].is_lost:
            return  # its batches were given up before
        images = self.devices[name].finished(number, now)
        for image, embedding in zip(images, result.embeddings, strict=True):
            ticket = image.ticket
            if not ticket.ended and ticket.received(image.index, embedding, result.finished_at):
                del self._requests[ticket]
                self._ended.append(ticket)

    def fail_batch(self, name: str, number: int, error: BaseException, now: float) -> None:
        """A batch has failed. Its images run again, each alone; an image that was alone ends its request."""
        if self.devices[name].is_lost:
            return
        images = self.devices[name].finished(number, now)
        if len(images) == 1:
            self.end(images[0].ticket, _encoding_failed(images[0].index, error))
        else:
            self._retry(images, error)

    def mark_lost(self, name: str) -> bool:
        """The device takes no more batches. False if it was lost already."""
        device = self.devices[name]
        was_lost, device.is_lost = device.is_lost, True
        self.has_lost_all = all(device.is_lost for device in self.devices.values())
        return not was_lost

    def end_lost(self, name: str) -> None:
        """Ends the requests that a lost device had; with the last device, the waiting ones, too."""
        device = self.devices[name]
        images = [image for batch in device.batches.values() for image in batch]
        device.batches.clear()
        if self.has_lost_all:
            images += self.waiting
        for image in images:
            self.end(image.ticket, _device_failed())

    def stuck_devices(self, timeout_s: float, now: float) -> list[str]:
        """Devices that have had work for `timeout_s` and finished none of it."""
        return [
            name
            for name, device in self.devices.items()
            if device.batches and device.last_progress_at < now - timeout_s
        ]

    def _pop(self, max_tokens: int, now: float) -> list[QueuedImage]:
        """Images from the front, at least one, as long as they fit. A retry is returned alone.

        All retries wait in front of the other images.
        """
        images: list[QueuedImage] = []
        num_tokens = 0
        while self.waiting:
            image = next(iter(self.waiting))
            if image.ticket.deadline <= now:
                self.end(image.ticket, DeadlineExceeded())
                continue
            num_tokens += image.num_tokens
            if images and num_tokens > max_tokens:
                break
            self._remove(image)
            image.ticket.taken(now)
            images.append(image)
            if image.is_retry:
                break
        return images

    def _remove(self, image: QueuedImage) -> None:
        """Takes an image out of the queue. Its tokens are no longer reserved."""
        del self.waiting[image]
        self.waiting_tokens -= image.num_tokens
        if not image.is_retry:
            self._reserved.own -= image.num_tokens
            image.ticket.reserved_tokens -= image.num_tokens

    def _retry(self, images: Sequence[QueuedImage], error: BaseException) -> None:
        """Puts the images of a failed batch back to the front."""
        logger.info("a batch of %d images failed and is run again one by one: %r", len(images), error)
        for image in reversed(images):
            ticket = image.ticket
            if not ticket.ended:
                again = QueuedImage(ticket, image.index, image.item, is_retry=True)
                self._requests[ticket].append(again)
                self.waiting[again] = None
                self.waiting.move_to_end(again, last=False)
                self.waiting_tokens += again.num_tokens

    def _full(self) -> TooManyRequests:
        """`Retry-After` is the time in which the devices encode what is reserved, from 1 to 10 seconds."""
        rate = sum(device.tokens_per_s for device in self.devices.values() if not device.is_lost)
        seconds = math.ceil(self.reserved_tokens / rate) if rate else _MIN_RETRY_AFTER_S
        return TooManyRequests(
            "the queue is full",
            code="queue_full",
            retry_after_s=min(max(seconds, _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S),
        )


def _device_failed() -> Unavailable:
    return Unavailable("the device failed; the server must be restarted", code="device_failed")


def _encoding_failed(index: int, cause: BaseException) -> ApiError:
    error: ApiError
    if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
        # The store has room, but its file system has not: others hold files that the store has dropped.
        message = "the file system of the store of tokens is full"
        error = TooManyRequests(message, code="handoff_full", retry_after_s=_MIN_RETRY_AFTER_S)
    else:
        error = InternalError("the encoder failed on this image", param=image_param(index))
    error.__cause__ = cause
    return error

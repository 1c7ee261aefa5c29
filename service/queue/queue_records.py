"""The records of the queue: its limits, one image, one batch, and one device with its batches.

Knows tokens, tickets and times; nothing of the order of the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models import EncodeItem
from service.queue.ticket import Ticket

_RATE_MEMORY = 0.9  # weight of the past in a device's average rate, at each batch


@dataclass(frozen=True)
class QueueLimits:
    """In image tokens, and seconds."""

    max_batch_tokens: int
    max_queue_tokens: int  # for each device
    max_wait_s: float = 0.0  # how long an image may wait for others to fill its batch


@dataclass(frozen=True, eq=False)
class QueuedImage:
    """One image of a request."""

    ticket: Ticket
    index: int  # of the image in its request
    item: EncodeItem
    is_retry: bool = False  # its batch failed: it runs alone, and its tokens are no longer reserved

    @property
    def num_tokens(self) -> int:
        return self.item.patches.num_tokens


@dataclass(frozen=True, eq=False)
class TakenBatch:
    """Images that a device has taken. `number` names the batch when its result comes back."""

    number: int
    images: Sequence[QueuedImage]

    @property
    def items(self) -> Sequence[EncodeItem]:
        return [image.item for image in self.images]


class DeviceRecord:
    """The batches of one device, and when it last finished one."""

    def __init__(self) -> None:
        self.batches: dict[int, Sequence[QueuedImage]] = {}  # by number
        self.last_progress_at = 0.0
        self.tokens_per_s = 0.0
        self.is_waiting = False  # its thread is inside `Batcher.take`
        self.is_lost = False

    @property
    def is_idle(self) -> bool:
        return self.is_waiting and not self.batches and not self.is_lost

    def started(self, batch: TakenBatch, now: float) -> None:
        """The device has taken a batch. This is progress only if it had no other batch."""
        if not self.batches:
            self.last_progress_at = now
        self.batches[batch.number] = batch.images

    def finished(self, number: int, now: float) -> Sequence[QueuedImage]:
        """The device has finished a batch. Returns its images."""
        images = self.batches.pop(number)
        rate = sum(image.num_tokens for image in images) / max(1e-6, now - self.last_progress_at)
        self.tokens_per_s = _RATE_MEMORY * (self.tokens_per_s or rate) + (1 - _RATE_MEMORY) * rate
        self.last_progress_at = now
        return images

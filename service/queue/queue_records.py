"""What the queue keeps account of: one image that waits or runs, and one device with what it has to do.

Knows tokens, tickets and times; nothing of the order of the queue.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from models import BatchResult, EncodeItem
from service.queue.ticket import Ticket

_RATE_MEMORY = 0.9  # weight of the past in a device's average rate, for each batch


@dataclass(frozen=True)
class QueueLimits:
    """In image tokens, and seconds."""

    max_batch_tokens: int
    max_queue_tokens: int  # for each device
    max_wait_s: float = 0.0  # for more images, while a batch is not full


@dataclass(frozen=True, eq=False)
class Entry:
    """One image of a request."""

    ticket: Ticket
    index: int
    item: EncodeItem
    is_retry: bool = False  # its batch failed: it runs alone, and its tokens are not reserved any more

    @property
    def num_tokens(self) -> int:
        return self.item.patches.num_tokens


class Device:
    """What one device has to do, and when it last got on."""

    def __init__(self) -> None:
        self.batches: dict[Future[BatchResult], Sequence[Entry]] = {}
        self.last_progress_at = 0.0
        self.tokens_per_s = 0.0
        self.is_waiting = False  # in `Batcher.take`
        self.is_lost = False

    @property
    def is_idle(self) -> bool:
        return self.is_waiting and not self.batches and not self.is_lost

    def started(self, batch: Future[BatchResult], entries: Sequence[Entry]) -> None:
        if not self.batches:
            self.last_progress_at = time.perf_counter()
        self.batches[batch] = entries

    def finished(self, batch: Future[BatchResult]) -> Sequence[Entry]:
        """The images of the batch."""
        entries, now = self.batches.pop(batch), time.perf_counter()
        rate = sum(entry.num_tokens for entry in entries) / max(1e-6, now - self.last_progress_at)
        self.tokens_per_s = _RATE_MEMORY * (self.tokens_per_s or rate) + (1 - _RATE_MEMORY) * rate
        self.last_progress_at = now
        return entries

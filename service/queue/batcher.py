"""The queue between requests and devices: admission by tokens, order, batches, failures.

First in, first out. No timer by default: a batch forms while the device is busy, and a device takes what
waits as soon as it has a place for a batch. Requests and devices call it from their own threads; nothing in
it waits but `take` and `wait`. Knows tokens, tickets and devices; nothing of HTTP, images or the encoder.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from models import BatchResult, BatchStats, DeviceError, EncodeItem
from service.errors import (
    DeadlineExceeded,
    InternalError,
    TooLarge,
    TooManyRequests,
    Unavailable,
    image_param,
)
from service.queue.queue_records import Device, Entry, QueueLimits
from service.queue.tally import OwnTally, Tally
from service.queue.ticket import Abandoned, Ticket, settle

logger = logging.getLogger(__name__)

# The images of a batch, and the future that its result goes to.
Batch = tuple[Sequence[EncodeItem], Future[BatchResult]]

_MIN_RETRY_AFTER_S, _MAX_RETRY_AFTER_S = 1, 10


class Batcher:
    """`observe` is told of every batch that a device finished, `on_lost` of a device that failed.

    `reserved` is the tally of tokens, for a queue that shares its limit with those of other processes.
    """

    def __init__(
        self,
        limits: QueueLimits,
        *,
        observe: Callable[[BatchStats], None],
        on_lost: Callable[[DeviceError], None],
        reserved: Tally | None = None,
    ) -> None:
        self._limits = limits
        self._observe = observe
        self._on_lost = on_lost
        self._changed = threading.Condition(threading.Lock())
        self._waiting: OrderedDict[Entry, None] = OrderedDict()
        self._entries: dict[Ticket, list[Entry]] = {}  # of requests that were queued and have not ended
        self._devices: dict[str, Device] = {}
        self._waiting_tokens = 0
        self._is_closed = False
        self._reserved = reserved or OwnTally()  # tokens admitted, and not taken by a device yet

    # For the metrics

    @property
    def waiting_images(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        return self._waiting_tokens

    @property
    def reserved_tokens(self) -> int:
        """Admitted here, and not taken by a device yet."""
        return self._reserved.own

    @property
    def limit_tokens(self) -> int:
        return self._limits.max_queue_tokens * max(1, len(self._devices))

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing runs."""
        with self._changed:
            return not self._waiting and not any(device.batches for device in self._devices.values())

    # For requests

    def check_room(self) -> None:
        """Raises `TooManyRequests` where not one token more would be admitted."""
        if self._reserved.total >= self.limit_tokens:
            raise self._full()

    def admit(self, ticket: Ticket, num_tokens: int) -> None:
        """Reserves room for all images of a request.

        Raises `TooManyRequests` while they do not fit, `TooLarge` if they never could, and `Unavailable` once
        no device is left.
        """
        if num_tokens > self.limit_tokens:
            raise TooLarge(
                f"the images make {num_tokens} tokens, and the queue holds {self.limit_tokens}",
                code="too_many_tokens",
            )
        with self._changed:
            if self._has_lost_all:
                raise _device_failed()
            if self._reserved.total + num_tokens > self.limit_tokens:
                raise self._full()
            if not ticket.ended:
                self._reserved.own += num_tokens
                ticket.reserved_tokens = num_tokens

    def put(self, ticket: Ticket, items: Sequence[EncodeItem]) -> None:
        """Queues the images of a request that was admitted, unless it has ended meanwhile."""
        with self._changed:
            if ticket.ended:
                return
            if self._has_lost_all:
                self._end(ticket, _device_failed())
                return
            ticket.queued(len(items), time.perf_counter())
            entries = [Entry(ticket, index, item) for index, item in enumerate(items)]
            self._entries[ticket] = entries
            for entry in entries:
                self._waiting[entry] = None
                self._waiting_tokens += entry.num_tokens
            self._changed.notify_all()

    def fail(self, ticket: Ticket, error: Exception) -> None:
        """Ends a request with an error, unless it has ended. What no device has taken is dropped."""
        with self._changed:
            self._end(ticket, error)

    def leave(self, ticket: Ticket) -> None:
        """Nobody waits for the ticket any more."""
        if not ticket.ended:
            self.fail(ticket, Abandoned())

    # For devices

    def add_device(self, name: str) -> DeviceQueue:
        """One more device will take batches; the queue grows by its share."""
        self._devices[name] = Device()
        return DeviceQueue(self, name)

    def take(self, name: str) -> Batch | None:
        """The next batch for a device that has a place for one; waits until there is one. None: no more."""
        device = self._devices[name]
        with self._changed:
            while self._waits_for_batch(device):
                if self._due_in_s() == 0 and not self._leaves_it(device):
                    batch = self._take(name, device, self._num_idle_but(device))
                    if batch is not None:
                        return batch
                self._wait(device)
        return None

    def wait(self, name: str) -> bool:
        """Waits until something is due for a device that has to be asked for a place. False: no more."""
        device = self._devices[name]
        with self._changed:
            while self._waits_for_batch(device):
                due_s = self._due_in_s()
                if due_s == 0:
                    return True
                self._changed.wait(due_s)
        return False

    def poll(self, name: str, num_idle_others: int) -> Batch | None:
        """What is due, for a device that has a place; beside it so many devices have nothing to do."""
        device = self._devices[name]
        with self._changed:
            if self._waits_for_batch(device) and self._due_in_s() == 0:
                return self._take(name, device, num_idle_others)
        return None

    def lose(self, name: str, error: DeviceError) -> None:
        """Ends the requests that a device was at work on, and those that wait if it was the last."""
        device = self._devices[name]
        with self._changed:
            if device.is_lost:
                return
            device.is_lost = True
        self._on_lost(error)  # before any caller can be told, and ask a probe
        with self._changed:
            lost = [entry.ticket for entries in device.batches.values() for entry in entries]
            device.batches.clear()
            if self._has_lost_all:
                lost += [entry.ticket for entry in self._waiting]
            for ticket in lost:
                self._end(ticket, _device_failed())
            self._changed.notify_all()

    def is_lost(self, name: str) -> bool:
        """Whether a device has been given up."""
        return self._devices[name].is_lost

    def stuck_devices(self, timeout_s: float) -> list[str]:
        """Devices that have had work for so long and finished none of it."""
        since = time.perf_counter() - timeout_s
        with self._changed:
            return [
                name
                for name, device in self._devices.items()
                if device.batches and device.last_progress_at < since
            ]

    def close(self) -> None:
        """Lets every `take` and `wait` return."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _finished(self, name: str, batch: Future[BatchResult]) -> None:
        """Runs in the thread that waited for the device."""
        error = batch.exception()
        if isinstance(error, DeviceError):
            self.lose(name, error)
            return
        try:
            if error is None:
                for stats in batch.result().stats:
                    self._observe(stats)  # before the callers look
        finally:
            with self._changed:
                self._take_back(self._devices[name], batch, error)
                self._changed.notify_all()

    # All below is called under the lock; `_full` also without it, where it may be a little out of date

    def _waits_for_batch(self, device: Device) -> bool:
        return not (self._is_closed or device.is_lost)

    def _wait(self, device: Device) -> None:
        """Until something changes, or what waits is due."""
        due_s = self._due_in_s()
        if due_s == 0 and not self._leaves_it(device):
            return  # it has become due just now
        device.is_waiting = True
        self._changed.wait(due_s or None)
        device.is_waiting = False

    @property
    def _has_lost_all(self) -> bool:
        return bool(self._devices) and all(device.is_lost for device in self._devices.values())

    def _take(self, name: str, device: Device, num_idle_others: int) -> Batch | None:
        """The device's share of what waits; None where all of it was too late."""
        share = math.ceil(self._waiting_tokens / (1 + num_idle_others))
        entries = self._pop(min(self._limits.max_batch_tokens, share))
        if not entries:
            return None
        batch: Future[BatchResult] = Future()
        device.started(batch, entries)
        batch.add_done_callback(partial(self._finished, name))
        if self._waiting:  # busy devices may have left it to this one, which was idle
            self._changed.notify_all()
        return [entry.item for entry in entries], batch

    def _leaves_it(self, device: Device) -> bool:
        """Whether the device is busy and another one idle, which shall have what waits."""
        return bool(device.batches) and self._num_idle_but(device) > 0

    def _num_idle_but(self, device: Device) -> int:
        return sum(other.is_idle for other in self._devices.values() if other is not device)

    def _due_in_s(self) -> float | None:
        """Seconds for which a batch that is not full waits for more, or 0; None: nothing waits."""
        if not self._waiting:
            return None
        if self._waiting_tokens >= self._limits.max_batch_tokens:
            return 0.0
        queued_at = next(iter(self._waiting)).ticket.queued_at
        assert queued_at is not None, "what waits was queued"
        return max(0.0, queued_at + self._limits.max_wait_s - time.perf_counter())

    def _pop(self, max_tokens: int) -> list[Entry]:
        """Images from the front, one at least. Requests whose deadline has passed are ended on the way."""
        entries: list[Entry] = []
        num_tokens, now = 0, time.perf_counter()
        while self._waiting:
            entry = next(iter(self._waiting))
            if entry.ticket.deadline <= now:
                self._end(entry.ticket, DeadlineExceeded())
                continue
            num_tokens += entry.num_tokens
            if entries and (num_tokens > max_tokens or entry.is_retry):
                break
            self._remove(entry)
            entry.ticket.taken(now)
            if entry.is_retry:
                return [entry]
            entries.append(entry)
        return entries

    def _remove(self, entry: Entry) -> None:
        del self._waiting[entry]
        self._waiting_tokens -= entry.num_tokens
        if not entry.is_retry:
            self._reserved.own -= entry.num_tokens
            entry.ticket.reserved_tokens -= entry.num_tokens

    def _take_back(self, device: Device, batch: Future[BatchResult], error: BaseException | None) -> None:
        if device.is_lost:
            return  # its batches were given up before
        entries = device.finished(batch)
        if error is None:
            self._hand_out(entries, batch.result())
        elif len(entries) == 1:
            self._end(entries[0].ticket, _encoding_failed(entries[0].index, error))
        else:
            self._retry(entries, error)

    def _hand_out(self, entries: Sequence[Entry], result: BatchResult) -> None:
        complete: list[Ticket] = []
        for entry, embedding in zip(entries, result.embeddings, strict=True):
            if not entry.ticket.ended and entry.ticket.received(entry.index, embedding, result.finished_at):
                del self._entries[entry.ticket]
                complete.append(entry.ticket)
        settle(complete)

    def _retry(self, entries: Sequence[Entry], error: BaseException) -> None:
        """Images of a batch that failed go back to the front, to be run one by one."""
        logger.info("a batch of %d images failed and is run again one by one: %r", len(entries), error)
        for entry in reversed(entries):
            ticket = entry.ticket
            if not ticket.ended:
                again = Entry(ticket, entry.index, entry.item, is_retry=True)
                self._entries[ticket].append(again)
                self._waiting[again] = None
                self._waiting.move_to_end(again, last=False)
                self._waiting_tokens += again.num_tokens

    def _end(self, ticket: Ticket, error: Exception) -> None:
        if ticket.ended:
            return
        for entry in self._entries.pop(ticket, ()):
            if entry in self._waiting:
                self._remove(entry)
        self._reserved.own -= ticket.reserved_tokens
        ticket.failed(error)
        settle([ticket])

    def _full(self) -> TooManyRequests:
        rate = sum(device.tokens_per_s for device in self._devices.values() if not device.is_lost)
        seconds = math.ceil(self.reserved_tokens / rate) if rate else _MIN_RETRY_AFTER_S
        return TooManyRequests(
            "the queue is full",
            code="queue_full",
            retry_after_s=min(max(seconds, _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S),
        )


class DeviceQueue:
    """The queue as one device sees it."""

    def __init__(self, batcher: Batcher, name: str) -> None:
        self._batcher = batcher
        self._name = name

    def take(self) -> Batch | None:
        """`Batcher.take` for this device."""
        return self._batcher.take(self._name)

    def wait(self) -> bool:
        """`Batcher.wait` for this device."""
        return self._batcher.wait(self._name)

    def poll(self, num_idle_others: int) -> Batch | None:
        """`Batcher.poll` for this device."""
        return self._batcher.poll(self._name, num_idle_others)


def _device_failed() -> Unavailable:
    return Unavailable("the device failed; the server must be restarted", code="device_failed")


def _encoding_failed(index: int, cause: BaseException) -> InternalError:
    error = InternalError("the encoder failed on this image", param=image_param(index))
    error.__cause__ = cause
    return error

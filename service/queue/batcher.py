"""The queue between requests and devices, for many threads.

    request:  reserve ──► put ──► … ──► its ticket ends
    device:   take ──► run (`models/replica.py`) ──► `_finished` hands out the embeddings, and again

`QueueState` decides; `Batcher` locks, waits and wakes. Requests and devices call it from their own threads.
Only `take` and `wait` block.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from models import BatchResult, BatchStats, DeviceError, EncodeItem
from service.queue.queue_records import QueueLimits, TakenBatch
from service.queue.queue_state import QueueState
from service.queue.tally import OwnTally, Tally
from service.queue.ticket import Abandoned, Ticket, settle

# The images of a batch, and the future that takes its result.
Job = tuple[Sequence[EncodeItem], Future[BatchResult]]


class Batcher:
    """Calls `observe` for every batch that a device finished, and `on_lost` for a device that failed.

    `reserved` is the tally of reserved tokens, if the limit is shared with other processes.
    """

    def __init__(
        self,
        limits: QueueLimits,
        *,
        observe: Callable[[BatchStats], None],
        on_lost: Callable[[DeviceError], None],
        reserved: Tally | None = None,
    ) -> None:
        self._state = QueueState(limits, reserved or OwnTally())
        self._observe = observe
        self._on_lost = on_lost
        self._changed = threading.Condition(threading.Lock())

    # For the metrics

    @property
    def waiting_images(self) -> int:
        return len(self._state.waiting)

    @property
    def waiting_tokens(self) -> int:
        return self._state.waiting_tokens

    @property
    def reserved_tokens(self) -> int:
        """Reserved here, and not taken by a device yet."""
        return self._state.reserved_tokens

    @property
    def limit_tokens(self) -> int:
        return self._state.limit_tokens

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing runs."""
        with self._changed:
            return self._state.is_idle

    # For requests

    def check_room(self) -> None:
        """As `QueueState.check_room`. Takes no lock: the answer may be a moment out of date."""
        self._state.check_room()

    def reserve(self, ticket: Ticket, num_tokens: int) -> None:
        """As `QueueState.reserve`."""
        with self._changed:
            self._state.reserve(ticket, num_tokens)

    def put(self, ticket: Ticket, items: Sequence[EncodeItem]) -> None:
        """As `QueueState.put`."""
        with self._changed:
            self._state.put(ticket, items, time.perf_counter())
            self._wake()

    def fail(self, ticket: Ticket, error: Exception) -> None:
        """Ends a request with an error, unless it has ended. Its images that still wait are dropped."""
        with self._changed:
            self._state.end(ticket, error)
            self._settle()

    def cancel(self, ticket: Ticket) -> None:
        """The caller no longer waits for the ticket."""
        if not ticket.ended:
            self.fail(ticket, Abandoned())

    # For devices

    def add_device(self, name: str) -> DeviceQueue:
        """As `QueueState.add_device`. Returns the queue as the device sees it."""
        self._state.add_device(name)
        return DeviceQueue(self, name)

    def take(self, name: str) -> Job | None:
        """Waits for the next batch of a device that has room for one. None if there will be no more."""
        state = self._state
        with self._changed:
            while state.is_serving(name):
                if self._is_due_for(name):
                    batch = self._take(name, state.num_idle_others(name))
                    if batch is not None:
                        return self._job(name, batch)
                self._wait(name)
        return None

    def wait(self, name: str) -> bool:
        """Waits until a batch may be taken. False if there will be no more.

        For a device in another process, which has to be asked for room before a batch is formed.
        """
        with self._changed:
            while self._state.is_serving(name):
                due_s = self._state.due_in_s(time.perf_counter())
                if due_s == 0:
                    return True
                self._changed.wait(due_s)
        return False

    def poll(self, name: str, num_idle_others: int) -> Job | None:
        """A batch for a device that has room for one, if one may be taken now; else None.

        `num_idle_others` other devices are idle.
        """
        with self._changed:
            if self._state.is_serving(name) and self._state.due_in_s(time.perf_counter()) == 0:
                batch = self._take(name, num_idle_others)
                if batch is not None:
                    return self._job(name, batch)
        return None

    def lose(self, name: str, error: DeviceError) -> None:
        """Ends the requests that a device was working on; with the last device, all waiting ones, too."""
        with self._changed:
            is_news = self._state.mark_lost(name)
        if not is_news:
            return
        self._on_lost(error)  # before a caller gets its error and asks a probe
        with self._changed:
            self._state.end_lost(name)
            self._wake()

    def is_lost(self, name: str) -> bool:
        """Whether a device has been given up."""
        return self._state.devices[name].is_lost

    def stuck_devices(self, timeout_s: float) -> list[str]:
        """As `QueueState.stuck_devices`."""
        with self._changed:
            return self._state.stuck_devices(timeout_s, time.perf_counter())

    def close(self) -> None:
        """Makes every `take` and `wait` return."""
        with self._changed:
            self._state.is_closed = True
            self._changed.notify_all()

    def _finished(self, name: str, number: int, done: Future[BatchResult]) -> None:
        """Runs in the thread that waited for the device."""
        error = done.exception()
        if isinstance(error, DeviceError):
            self.lose(name, error)
            return
        try:
            if error is None:
                for stats in done.result().stats:
                    self._observe(stats)  # before the callers get their answers and read the metrics
        finally:
            with self._changed:
                if error is None:
                    self._state.finish_batch(name, number, done.result(), time.perf_counter())
                else:
                    self._state.fail_batch(name, number, error, time.perf_counter())
                self._wake()

    # The rest is called with the lock held.

    def _is_due_for(self, name: str) -> bool:
        is_due = self._state.due_in_s(time.perf_counter()) == 0
        return is_due and not self._state.leaves_to_others(name)

    def _take(self, name: str, num_idle_others: int) -> TakenBatch | None:
        batch = self._state.take(name, num_idle_others, time.perf_counter())
        self._settle()  # requests past their deadline
        if batch is not None and self._state.waiting:
            self._changed.notify_all()  # busy devices may have left the rest to this one, which was idle
        return batch

    def _job(self, name: str, batch: TakenBatch) -> Job:
        future: Future[BatchResult] = Future()
        future.add_done_callback(partial(self._finished, name, batch.number))
        return batch.items, future

    def _wait(self, name: str) -> None:
        """Waits until something changes, or until a batch may be taken."""
        due_s = self._state.due_in_s(time.perf_counter())
        if due_s == 0 and not self._state.leaves_to_others(name):
            return  # it became due just now
        device = self._state.devices[name]
        device.is_waiting = True
        self._changed.wait(due_s or None)
        device.is_waiting = False

    def _wake(self) -> None:
        """Wakes the coroutines of requests that have ended, and the threads of devices that wait."""
        self._settle()
        self._changed.notify_all()

    def _settle(self) -> None:
        ended = self._state.pop_ended()
        if ended:
            settle(ended)


class DeviceQueue:
    """The queue as one device sees it."""

    def __init__(self, batcher: Batcher, name: str) -> None:
        self._batcher = batcher
        self._name = name

    def take(self) -> Job | None:
        """`Batcher.take` for this device."""
        return self._batcher.take(self._name)

    def wait(self) -> bool:
        """`Batcher.wait` for this device."""
        return self._batcher.wait(self._name)

    def poll(self, num_idle_others: int) -> Job | None:
        """`Batcher.poll` for this device."""
        return self._batcher.poll(self._name, num_idle_others)

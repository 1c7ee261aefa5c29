"""A batcher whose devices are driven by the test."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from models import BatchResult, BatchStats, EncodeItem
from service.queue.batcher import Batcher
from service.queue.queue_records import QueueLimits
from service.queue.ticket import Ticket
from tests.support.queueing import Callers, value_of
from tests.support.waiting import eventually

LOST = torch.AcceleratorError("illegal memory access")


class RunningJob:
    """A batch that a device has taken. The test ends it."""

    def __init__(self, device: str, items: Sequence[EncodeItem], future: Future[BatchResult]) -> None:
        self.device = device
        self.items = items
        self._future = future

    @property
    def values(self) -> list[int]:
        return [value_of(image) for image in self.items]

    @property
    def num_tokens(self) -> int:
        return sum(image.patches.num_tokens for image in self.items)

    def finish(self) -> None:
        """Ends the batch. Each embedding is the value of its image."""
        embeddings = tuple(torch.tensor([value]) for value in self.values)
        stats = BatchStats(self.device, len(self.items), self.num_tokens, 0, {}, {}, 0, 0.1)
        now = time.perf_counter()
        self._future.set_result(BatchResult(embeddings, (stats,), now, now))

    def fail(self, error: Exception) -> None:
        self._future.set_exception(error)


class Queue:
    """A queue with devices and callers."""

    def __init__(
        self,
        callers: Callers,
        devices: Sequence[str] = ("a",),
        *,
        max_batch_tokens: int = 10,
        max_queue_tokens: int = 100,
        max_wait_s: float = 0.0,
    ) -> None:
        self.callers = callers
        self.observed: list[BatchStats] = []
        self.lost: list[str] = []
        self.batcher = Batcher(
            QueueLimits(max_batch_tokens, max_queue_tokens, max_wait_s),
            observe=self.observed.append,
            on_lost=lambda error: self.lost.append(error.device),
        )
        for name in devices:
            self.batcher.add_device(name)
        self._threads = ThreadPoolExecutor(len(devices) + 1)

    def put(self, *images: EncodeItem, deadline: float = float("inf")) -> Ticket:
        return self.callers.put(self.batcher, *images, deadline=deadline)

    def take(self, device: str = "a") -> RunningJob:
        """Takes a batch in another thread, so that the test fails, rather than hangs, if there is none."""
        taken = self._threads.submit(self.batcher.take, device).result(10)
        assert taken is not None, "no more batches"
        return RunningJob(device, *taken)

    def waiting(self, device: str = "a") -> Future[RunningJob | None]:
        """Calls `take` in another thread, and returns once it waits."""

        def take() -> RunningJob | None:
            taken = self.batcher.take(device)
            return None if taken is None else RunningJob(device, *taken)

        future = self._threads.submit(take)
        eventually(lambda: self.batcher._state.devices[device].is_waiting)
        return future

    def wait(self, device: str = "a") -> Future[bool]:
        """Calls `Batcher.wait` in another thread."""
        return self._threads.submit(self.batcher.wait, device)

    def poll(self, device: str = "a", num_idle_others: int = 0) -> RunningJob | None:
        taken = self.batcher.poll(device, num_idle_others)
        return None if taken is None else RunningJob(device, *taken)

    def answer(self, ticket: Ticket) -> list[int]:
        return [int(embedding) for embedding in self.callers.outcome(ticket)]

    def assert_empty(self) -> None:
        assert (self.batcher.waiting_images, self.batcher.waiting_tokens) == (0, 0)
        assert self.batcher.reserved_tokens == 0
        assert self.batcher.is_idle

    def close(self) -> None:
        self.batcher.close()
        self._threads.shutdown()


MakeQueue = Callable[..., Queue]

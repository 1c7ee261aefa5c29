"""One request on its way through the queue, as its coroutine and the queue see it.

Knows the times of its stages and its embeddings; nothing of HTTP, of decoding or of the order of the queue.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

from service.metrics import Stage

# Each answer takes the event loop about half a millisecond.
_MAX_WOKEN_AT_ONCE = 2


class Abandoned(Exception):
    """The caller no longer waits for the ticket."""


class Ticket:
    """One coroutine awaits it. The queue changes it, under its lock. Times are `time.perf_counter()`."""

    def __init__(self, deadline: float = float("inf")) -> None:
        self.deadline = deadline
        self.reserved_tokens = 0  # and not taken by a device yet
        self.ended = False
        self.queued_at: float | None = None
        self.taken_at: float | None = None  # when a device took the first of its images
        self.finished_at: float | None = None
        self._loop = asyncio.get_running_loop()
        self._settled: asyncio.Future[None] = self._loop.create_future()
        self._embeddings: list[torch.Tensor | None] = []
        self._missing = 0
        self._error: Exception | None = None

    def stages_s(self, started_at: float) -> dict[Stage, float]:
        """The duration of each stage that has ended, in seconds. Decoding began at `started_at`."""
        marks = (started_at, self.queued_at, self.taken_at, self.finished_at)
        stages: tuple[Stage, ...] = ("decode", "queue", "encode")
        return {
            stage: end - begin
            for stage, (begin, end) in zip(stages, pairwise(marks), strict=True)
            if begin is not None and end is not None
        }

    async def embeddings(self) -> Sequence[torch.Tensor]:
        """Waits for the embeddings of all images, in order, on the host.

        Each is [hidden] if pooled, else [tokens, width].

        Raises the error that ended the request.
        """
        await self._settled
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        return [embedding for embedding in self._embeddings if embedding is not None]

    def queued(self, num_images: int, now: float) -> None:
        self.queued_at = now
        self._missing = num_images
        self._embeddings = [None] * num_images

    def taken(self, now: float) -> None:
        if self.taken_at is None:
            self.taken_at = now

    def received(self, index: int, embedding: torch.Tensor, now: float) -> bool:
        """Takes the embedding of one image. True if it was the last one."""
        self._embeddings[index] = embedding
        self._missing -= 1
        if self._missing == 0:
            self.ended = True
            self.finished_at = now
        return self.ended

    def failed(self, error: Exception) -> None:
        self.ended = True
        self._error = error


def settle(tickets: Iterable[Ticket]) -> None:
    """Wakes the coroutines that await these tickets. Any thread may call it. One call for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, deque[Ticket]] = defaultdict(deque)
    for ticket in tickets:
        by_loop[ticket._loop].append(ticket)
    for loop, group in by_loop.items():
        if not loop.is_closed():  # else nothing awaits them
            loop.call_soon_threadsafe(_settle, loop, group)


def _settle(loop: asyncio.AbstractEventLoop, tickets: deque[Ticket]) -> None:
    """Wakes a few at a time, so that other work of the loop does not wait for a whole batch of answers."""
    for _ in range(min(_MAX_WOKEN_AT_ONCE, len(tickets))):
        ticket = tickets.popleft()
        if not ticket._settled.done():
            ticket._settled.set_result(None)
    if tickets:
        loop.call_soon(_settle, loop, tickets)

"""A queue state with a clock by hand, and the batches that devices take from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from models import BatchResult, EncodeItem
from service.queue.queue_records import QueueLimits, TakenBatch
from service.queue.queue_state import QueueState
from service.queue.tally import OwnTally
from service.queue.ticket import Abandoned, Ticket, settle
from tests.support.queueing import Callers, value_of

NEVER = float("inf")


class QueueByHand:
    """A queue state with devices and callers. Its time is `now`, in seconds."""

    def __init__(
        self,
        callers: Callers,
        devices: Sequence[str] = ("a",),
        *,
        max_batch_tokens: int = 10,
        max_queue_tokens: int = 100,
    ) -> None:
        self.callers = callers
        self.now = 1000.0
        self.state = QueueState(QueueLimits(max_batch_tokens, max_queue_tokens), OwnTally())
        for name in devices:
            self.state.add_device(name)

    def reserve(self, ticket: Ticket, num_tokens: int) -> None:
        self.state.reserve(ticket, num_tokens)

    def enqueue(self, ticket: Ticket, images: Sequence[EncodeItem]) -> None:
        self.state.put(ticket, images, self.now)
        self.wake()

    def put(self, *images: EncodeItem, deadline: float = NEVER) -> Ticket:
        """Reserves the tokens of a request and queues its images. Returns its ticket."""
        ticket = self.callers.ticket(deadline)
        self.reserve(ticket, sum(image.patches.num_tokens for image in images))
        self.enqueue(ticket, images)
        return ticket

    def poll(self, device: str = "a", num_idle_others: int | None = None) -> Batch | None:
        if num_idle_others is None:
            num_idle_others = self.state.num_idle_others(device)
        taken = self.state.take(device, num_idle_others, self.now)
        self.wake()
        return None if taken is None else Batch(self, device, taken)

    def take(self, device: str = "a") -> Batch:
        batch = self.poll(device)
        assert batch is not None, "nothing to take"
        return batch

    def end(self, ticket: Ticket, error: Exception) -> None:
        self.state.end(ticket, error)
        self.wake()

    def cancel(self, ticket: Ticket) -> None:
        self.end(ticket, Abandoned())

    def lose(self, device: str) -> bool:
        """False if the device was lost before."""
        is_news = self.state.mark_lost(device)
        if is_news:
            self.state.end_lost(device)
            self.wake()
        return is_news

    def wake(self) -> None:
        settle(self.state.pop_ended())

    def answer(self, ticket: Ticket) -> list[int]:
        return [int(embedding) for embedding in self.callers.outcome(ticket)]

    @property
    def waiting(self) -> tuple[int, int]:
        """The number of waiting images, and of their tokens."""
        return len(self.state.waiting), self.state.waiting_tokens

    def assert_empty(self) -> None:
        assert self.waiting == (0, 0)
        assert self.state.reserved_tokens == 0
        assert self.state.is_idle


class Batch:
    """A batch that a device has taken. The test ends it."""

    def __init__(self, queue: QueueByHand, device: str, taken: TakenBatch) -> None:
        self.queue = queue
        self.device = device
        self.taken = taken

    @property
    def items(self) -> Sequence[EncodeItem]:
        return self.taken.items

    @property
    def values(self) -> list[int]:
        return [value_of(image) for image in self.items]

    @property
    def num_tokens(self) -> int:
        return sum(image.patches.num_tokens for image in self.items)

    def finish(self) -> None:
        """Ends the batch. Each embedding is the value of its image."""
        embeddings = tuple(torch.tensor([value]) for value in self.values)
        result = BatchResult(embeddings, (), self.queue.now, self.queue.now)
        self.queue.state.finish_batch(self.device, self.taken.number, result, self.queue.now)
        self.queue.wake()

    def fail(self, error: Exception) -> None:
        self.queue.state.fail_batch(self.device, self.taken.number, error, self.queue.now)
        self.queue.wake()


MakeState = Callable[..., QueueByHand]

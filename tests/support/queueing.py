"""Requests to the queue without HTTP or image files: tickets, and the event loop that awaits them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from models import EncodeItem, OutputSpec, Patches
from service.queue.batcher import Batcher
from service.queue.ticket import Ticket

POOLED = OutputSpec(pooled=True, deepstack=False)


def item(num_tokens: int = 1, value: int = 0, output: OutputSpec = POOLED) -> EncodeItem:
    """An image whose pixels are all `value`."""
    pixels = torch.full((4 * num_tokens, 4), value, dtype=torch.uint8)
    return EncodeItem(Patches(pixels, (1, 2, 2 * num_tokens), num_tokens), output)


def value_of(image: EncodeItem) -> int:
    return int(image.patches.pixels[0, 0])


class Callers:
    """Callers that await tickets. Their event loop runs only inside `outcome` and `error`."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()

    def ticket(self, deadline: float = float("inf")) -> Ticket:
        async def make() -> Ticket:
            return Ticket(deadline)

        return self.runner.run(make())

    def put(self, batcher: Batcher, *images: EncodeItem, deadline: float = float("inf")) -> Ticket:
        """Reserves the tokens of a request and queues its images. Returns its ticket."""
        ticket = self.ticket(deadline)
        batcher.reserve(ticket, sum(image.patches.num_tokens for image in images))
        batcher.put(ticket, images)
        return ticket

    def outcome(self, ticket: Ticket) -> Sequence[torch.Tensor]:
        """Returns the embeddings. Raises the error that ended the request."""
        return self.runner.run(asyncio.wait_for(ticket.embeddings(), 10))

    def error(self, ticket: Ticket) -> Exception:
        """Returns the error that ended the request."""
        try:
            self.outcome(ticket)
        except Exception as error:
            return error
        raise AssertionError("the request has embeddings")

    def close(self) -> None:
        self.runner.close()

"""Queues whose devices and clocks a test drives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.batcher import MakeQueue, Queue
from tests.support.queue_state import MakeState, QueueByHand
from tests.support.queueing import Callers


@pytest.fixture
def make_state(callers: Callers) -> MakeState:
    def make_queue(*devices: str, max_batch_tokens: int = 10, max_queue_tokens: int = 100) -> QueueByHand:
        return QueueByHand(
            callers,
            devices or ("a",),
            max_batch_tokens=max_batch_tokens,
            max_queue_tokens=max_queue_tokens,
        )

    return make_queue


@pytest.fixture
def make_queue(callers: Callers) -> Iterator[MakeQueue]:
    made: list[Queue] = []

    def make_queue(
        *devices: str, max_batch_tokens: int = 10, max_queue_tokens: int = 100, max_wait_s: float = 0.0
    ) -> Queue:
        made.append(
            Queue(
                callers,
                devices or ("a",),
                max_batch_tokens=max_batch_tokens,
                max_queue_tokens=max_queue_tokens,
                max_wait_s=max_wait_s,
            )
        )
        return made[-1]

    yield make_queue
    for queue in made:
        queue.close()

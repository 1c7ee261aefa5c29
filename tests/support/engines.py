"""Engines with fake replicas, and requests for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from prometheus_client import CollectorRegistry

from models import EncodeItem, ReplicaGroup
from service.engine.engine import Engine
from service.errors import Unavailable
from service.metrics import Metrics
from service.queue.queue_records import QueueLimits
from service.queue.ticket import Ticket
from tests.support.app import FakeEncoder
from tests.support.queueing import Callers, item

StartEngine = Callable[..., Engine]


LIMITS = QueueLimits(max_batch_tokens=1000, max_queue_tokens=10_000)


def make_engine(
    start_replicas: Callable[[], ReplicaGroup], registry: CollectorRegistry, metrics: Metrics | None = None
) -> Engine:
    return Engine(start_replicas, LIMITS, metrics or Metrics(registry, ()), model_name="m", version="1")


def put(callers: Callers, engine: Engine, num_images: int = 1) -> Ticket:
    """A request that waits for a device."""
    return callers.put(engine.batcher, *[item(4)] * num_images)


def code_of(check: Callable[[], object]) -> str:
    with pytest.raises(Unavailable) as caught:
        check()
    return code_of_error(caught.value)


def code_of_error(error: Exception) -> str:
    assert isinstance(error, Unavailable)
    assert error.headers() == {"Retry-After": "5"}
    return error.code


def accept(engine: Engine) -> None:
    with engine.accept():
        pass


def fail_with(error: BaseException) -> FakeEncoder:
    def fail(items: Sequence[EncodeItem]) -> None:
        raise error

    return FakeEncoder(fail)

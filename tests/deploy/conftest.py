from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.vllm_connector import Scheduler, connector_module


@pytest.fixture
def connector() -> Iterator[Any]:
    """The module of vLLM's connector."""
    with connector_module() as module:
        yield module


@pytest.fixture
def scheduler(connector: Any) -> Iterator[Callable[..., Scheduler]]:
    """Makes a connector in a scheduler, with an extra configuration."""
    made: list[Scheduler] = []

    def make(**extra: object) -> Scheduler:
        made.append(Scheduler(connector, **extra))
        return made[-1]

    yield make
    for each in made:
        each.connector.shutdown()

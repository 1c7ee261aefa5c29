"""Engines and servers on fake encoders."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from models import ReplicaGroup
from service.config.settings import Settings
from service.engine.engine import Engine, State
from service.metrics import Metrics
from tests.support.app import FakeEncoder, fake_replicas
from tests.support.engines import StartEngine, make_engine
from tests.support.faults import (
    SETTINGS,
    Serve,
)
from tests.support.serving import Served
from tests.support.waiting import eventually


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def start_engine(registry: CollectorRegistry) -> Iterator[StartEngine]:
    """Starts an engine on fake encoders."""
    running: list[tuple[Engine, ReplicaGroup]] = []

    def start_engine(
        *encoders: FakeEncoder,
        load: Callable[[], object] = lambda: None,
        wait: bool = True,
        metrics: Metrics | None = None,
    ) -> Engine:
        group = fake_replicas(*(encoders or (FakeEncoder(),)), load=load)
        engine = make_engine(lambda: group, registry, metrics)
        running.append((engine, group))
        engine.start()
        if wait:
            eventually(lambda: engine.state is not State.LOADING)
        return engine

    yield start_engine
    for engine, group in running:
        engine.batcher.close()
        group.close()


@pytest.fixture
def serve_faulty() -> Iterator[Serve]:
    """Starts servers, waits until they are ready, and stops them at the end."""
    started: list[Served] = []

    def start(*encoders: FakeEncoder, **changes: Any) -> Served:
        served = Served(Settings(**{**SETTINGS.model_dump(exclude_unset=True), **changes}), *encoders)
        started.append(served)
        served.wait_for(State.READY)
        return served

    yield start
    for served in started:
        served.stop()
        served.wait_for_the_end()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "service")
    return caplog

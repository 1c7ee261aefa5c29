"""A fake encoder with known answers, images to send, and the app around both."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from models import (
    ReplicaGroup,
)
from service.app import create_app
from service.config.settings import Settings
from service.engine.engine import State
from service.handoff.folder import open_handoff_folder
from tests.support.app import (
    FakeEncoder,
    Service,
    fake_replicas,
    only,
)
from tests.support.app_requests import running_demo
from tests.support.queueing import Callers


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What is in a cycle stays, so that a test sees it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def serve() -> Iterator[Callable[..., Service]]:
    """Starts apps with fake encoders, which are loaded once `load` returns; stops them at the end.

    Several encoders are replicas called `fake:0`, `fake:1` and so on; a single one is called `fake`.
    `start_replicas` takes the place of all that.
    """
    running: list[Service] = []

    def start(
        settings: Settings | None = None,
        *,
        encoders: Sequence[FakeEncoder] = (),
        load: Callable[[], object] = lambda: None,
        start_replicas: Callable[[Settings], ReplicaGroup] | None = None,
        state: State = State.READY,
    ) -> Service:
        fakes = encoders or (FakeEncoder(),)
        registry = CollectorRegistry()
        app = create_app(
            settings or Settings(decode_threads=2, cache_bytes=0),
            registry=registry,
            start_replicas=start_replicas or (lambda settings: fake_replicas(*fakes, load=load)),
        )
        service = Service(app, registry, *fakes)
        service.start()
        running.append(service)
        service.wait_for(state)
        return service

    yield start
    for service in running:
        service.stop()


@pytest.fixture
def service(serve: Callable[..., Service]) -> Service:
    """The app, ready, with the default settings."""
    return serve()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Holds a thread up until it is set, at the latest at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def callers() -> Iterator[Callers]:
    callers = Callers()
    yield callers
    callers.close()


@pytest.fixture
def settings() -> Settings:
    return Settings(decode_threads=2, cache_bytes=0)


@pytest.fixture
def with_store(settings: Settings, tmp_path: Path) -> Iterator[Settings]:
    """Settings with a folder for tokens, which is open."""
    changed = only(settings, handoff_dir=tmp_path / "tokens", handoff_bytes=2**24)
    with open_handoff_folder(changed):
        yield changed


@pytest.fixture(scope="module")
def demo() -> Iterator[Service]:
    yield from running_demo(Settings(decode_threads=2, device="cpu", max_pixels=65536 * 2, cache_bytes=0))

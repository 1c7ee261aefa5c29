from __future__ import annotations

from collections.abc import Iterator

import pytest

from service.config.settings import Settings
from service.engine.engine import State
from tests.support.app import FakeEncoder, only
from tests.support.chats import Door
from tests.support.llm_server import LlmServer
from tests.support.serving import Served


@pytest.fixture
def llm() -> Iterator[LlmServer]:
    with LlmServer() as server:
        yield server


@pytest.fixture
def open_door(llm: LlmServer, with_store: Settings) -> Iterator[Door]:
    """Starts servers in front of the LLM server, and stops them at the end. `changes` are to the settings."""
    running: list[Served] = []

    def start(encoder: FakeEncoder | None = None, **changes: object) -> Served:
        settings = only(with_store, **{"llm_url": llm.url, "shutdown_grace_s": 30, **changes})
        served = Served(settings, encoder or FakeEncoder())
        running.append(served)
        served.wait_for(State.READY)
        return served

    yield start
    for served in running:
        served.stop()
        served.wait_for_the_end()


@pytest.fixture
def door(open_door: Door) -> Served:
    return open_door()

"""One server process with the demo model, for all tests that talk to it through real clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.process import Process


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """`http://127.0.0.1:…` of a server that is ready."""
    process = Process("--port", "0", "--device", "cpu", "--decode-threads", "2").ready()
    yield process.url
    process.kill()

"""One server process with the demo model, for all tests that talk to it through real clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.process import Process


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`http://127.0.0.1:…` of a server that is ready."""
    folder = str(tmp_path_factory.mktemp("store") / "tokens")
    flags = ("--port", "0", "--device", "cpu", "--decode-threads", "2")
    process = Process(*flags, "--cache-bytes", "0", "--handoff-dir", folder).ready()
    yield process.url
    process.kill()

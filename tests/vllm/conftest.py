"""Stock vLLM and vision-sidecar, started for each type of model, and what was checked with them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.vllm_checkpoints import LLM_TYPES, write_checkpoint
from tests.support.vllm_lab import Lab, start_lab
from tests.support.vllm_server import version

_LINES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session", params=LLM_TYPES)
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """All servers for one type of model. Tests of one type run together."""
    model_type: str = request.param
    folder = tmp_path_factory.mktemp(model_type)
    checkpoint = write_checkpoint(model_type, folder / "checkpoint")
    stores = Path(tempfile.mkdtemp(prefix="vision-sidecar-check-", dir="/dev/shm"))
    try:
        with start_lab(model_type, checkpoint, stores, folder) as lab:
            yield lab
    finally:
        shutil.rmtree(stores)


@pytest.fixture
def report(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Adds a line to the end of the output."""
    return pytestconfig.stash.setdefault(_LINES, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says what was compared, and with which versions."""
    lines = config.stash.get(_LINES, [])
    if lines:
        terminalreporter.section(f"checked with {version()}")
        for line in lines:
            terminalreporter.write_line(line)

"""Stock vLLM in a process of its own, from the environment that `make check-vllm` installs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.project import ROOT
from tests.support.sidecar import free_port

BIN = ROOT / ".venv-vllm/bin"
MODEL = "tiny"  # the name under which every server serves its model
CONNECTOR = "vision_sidecar_connector"

_ENVIRON = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": str(ROOT / "deploy/vllm"),  # as the connector's documents say
}
_FLAGS = [
    *("--dtype=float32", "--enforce-eager", "--seed=0"),
    *("--max-model-len=16384", "--max-num-seqs=16", f"--kv-cache-memory-bytes={2**28}"),
]
_START_S = 180.0


class VllmServer:
    """A server that starts. `wait` returns once it takes requests."""

    def __init__(self, checkpoint: Path, log: Path, *flags: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        command = [BIN / "vllm", "serve", checkpoint, f"--served-model-name={MODEL}", f"--port={port}"]
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [*map(str, command), "--host=127.0.0.1", *_FLAGS, *flags],
                env=os.environ | _ENVIRON,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def wait(self) -> None:
        """Waits until the server takes requests."""
        deadline = time.monotonic() + _START_S
        while not self.is_healthy():
            assert time.monotonic() < deadline, f"vLLM has not started yet:\n{self.log()[-4000:]}"
            assert self._process.poll() is None, f"vLLM ended:\n{self.log()[-4000:]}"
            time.sleep(0.2)  # the start takes all cores

    def is_healthy(self) -> bool:
        """Whether the server and its engine run."""
        try:
            return httpx.get(f"{self.url}/health", timeout=5).is_success
        except httpx.TransportError:
            return False

    def log(self) -> str:
        return self._log.read_text()

    def metric(self, name: str, **labels: str) -> float:
        """The sum over the series of a metric that have these labels. `name`: without vLLM's prefix."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        families = text_string_to_metric_families(text)
        samples = [
            sample for family in families for sample in family.samples if sample.name == f"vllm:{name}"
        ]
        found = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
        assert found, f"vLLM has no metric {name} {labels}"
        return sum(found)

    def stop(self) -> None:
        """Ends all its processes."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _kill_group(self._process.pid)
            self._process.wait()


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


@contextmanager
def running(checkpoint: Path, log: Path, *flags: str) -> Iterator[VllmServer]:
    """A server that takes requests."""
    server = VllmServer(checkpoint, log, *flags)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def connector_flag(extra: Mapping[str, Any]) -> str:
    """The flag that has vLLM load tokens through our connector."""
    config = {
        "ec_connector": "VisionSidecarConnector",
        "ec_connector_module_path": CONNECTOR,
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": extra,
    }
    return f"--ec-transfer-config={json.dumps(config)}"


def version() -> str:
    """The versions of vLLM and of what matters beside it."""
    names = ("vllm", "torch", "transformers")
    text = f"from importlib.metadata import version; print(*map(version, {names!r}))"
    found = subprocess.run([BIN / "python", "-c", text], capture_output=True, text=True, check=True).stdout
    return ", ".join(f"{name} {number}" for name, number in zip(names, found.split(), strict=True))

"""Load on a fake server, as `bench serve` makes it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from service.bench import command as bench
from service.bench.load import Notes, Share, Span, send_all
from tests.support.fake_server import FakeServer

REQUEST = memoryview(b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc")


def measure(server: FakeServer, *flags: str, tmp_path: Path) -> dict[str, Any]:
    """Runs `bench serve` against a server and returns its JSON report."""
    path = tmp_path / "report.json"
    command = ["serve", "--url", server.url, "--warmup", "0", "--json", str(path), "--size", "64x32"]
    assert bench.main([*command, *flags]) == 0
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def share(port: int, requests: Path = Path(), **changes: Any) -> Share:
    values: dict[str, Any] = {"rate": None, "concurrency": 1, "total_s": 0.5, "timeout_s": 5.0, "seed": "0"}
    values["run"] = "0"
    return Share("127.0.0.1", port, requests, (Span(0, 1, ()),), first=0, **(values | changes))


def load(share: Share) -> Notes:
    """Sends a share from the process of the test."""
    read_end, write_end = os.pipe()
    try:
        return asyncio.run(send_all(share, [[REQUEST]], time.monotonic(), read_end))
    finally:
        os.close(read_end)
        os.close(write_end)

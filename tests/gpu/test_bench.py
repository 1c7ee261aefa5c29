"""The encoder's benchmark on a GPU, with the demo model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models import random_checkpoint
from service.bench import command as bench

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]


def test_report_has_kernels_and_padding_of_the_measured_batches(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    flags = "--size demo --workloads 1x336,20x336 --sides graph --repeats 3 --profile"
    assert bench.main(["encoder", *flags.split(), "--device", "cuda", "--json", str(report)]) == 0
    single, batch = json.loads(report.read_text())["rows"]
    assert single["padded_share"] == pytest.approx(4 / 104)  # a budget of 104 tokens, and twice 1024
    assert batch["padded_share"] == pytest.approx(48 / 2048)
    rotations = [kernel["calls"] for kernel in single["kernels"] if kernel["name"] == "rotate"]
    assert rotations == [random_checkpoint("demo").vision.depth]
    assert all(row["cpu_ms"] > 0 for row in (single, batch))

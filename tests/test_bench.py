from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from models import Patches, Preprocessor, random_checkpoint
from service import bench
from service.bench.encoder import arithmetic
from service.bench.workloads import WORKLOADS, make_workload

EIGHT_B = random_checkpoint("8B")
PREPROCESSOR = Preprocessor(EIGHT_B.preprocess)


def patches(height: int, width: int) -> Patches:
    return Patches(
        torch.zeros(height * width, 768, dtype=torch.uint8), (1, height, width), height * width // 4
    )


@pytest.mark.parametrize(
    ("name", "images", "num_patches"),
    [
        ("1x336", 1, 400),
        ("20x336", 20, 8000),
        ("1x1024", 1, 4096),
        ("1x2048", 1, 16384),
        ("mix", 8, 13520),
        ("random-mm", 20, 8000),
    ],
)
def test_batches_have_their_sizes(name: str, images: int, num_patches: int) -> None:
    workload = make_workload(name, PREPROCESSOR, repeats=2)
    batches = list(workload.images(PREPROCESSOR))
    assert len(batches) == workload.num_warmup + 2
    for batch in batches:
        assert len(batch) == images
        assert sum(len(image.pixels) for image in batch) == num_patches
        assert all(image.pixels.shape == (image.grid_thw[1] * image.grid_thw[2], 768) for image in batch)


def test_the_trace_has_the_published_sizes() -> None:
    workload = make_workload("trace", PREPROCESSOR, repeats=6)
    sizes = [height * width for ((height, width),) in workload.batches]
    assert sizes == [8836, 15376, 24336, 35344, 47380, 62500] * 2


def test_the_stream_is_what_people_send() -> None:
    workload = make_workload("stream", PREPROCESSOR)
    assert len(workload.batches) == 3300
    tokens = torch.tensor([height * width / 4 for ((height, width),) in workload.batches])
    assert 330 < tokens.median() < 380
    assert 1000 < tokens.quantile(0.99) < 1200  # near one megapixel


def test_arithmetic_is_counted_by_hand() -> None:
    vision = EIGHT_B.vision
    linear = 27 * (4 * 1152 * 1152 + 2 * 1152 * 4304) * 400
    attention = 27 * 2 * 400 * 400 * 1152
    mergers = 4 * 100 * (4608 * 4608 + 4608 * 4096)
    assert arithmetic(patches(20, 20), vision) == 2 * (linear + attention + mergers + 400 * 768 * 1152)


def test_the_benchmark_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    flags = "--size demo --workloads 1x336,random-mm --sides transformers,eager --repeats 2 --dtype float32"
    assert bench.main(["encoder", *flags.split(), "--device", "cpu", "--json", str(report)]) == 0
    content = json.loads(report.read_text())
    rows = {(row["workload"], row["side"]): row for row in content["rows"]}
    assert len(rows) == 4
    for (workload, _), row in rows.items():
        assert row["batches"] == 2
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        images = 20 if workload == "random-mm" else 1
        assert row["images_per_s"] == pytest.approx(images * 1e3 / row["mean_ms"])
        assert row["utilisation"] > 0
        assert row["padded_share"] == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + 4 + 1
    assert content["product_flops"] > 0


@pytest.mark.parametrize(
    "flags",
    [
        ["--workloads", "2x2"],
        ["--sides", "eager,vllm"],
        ["--size", "9B"],
        ["--device", "tpu"],
        ["--device", "cuda:99"],
        ["--json", "/no/such/folder"],
        ["--model", "/no/such/model"],
    ],
)
def test_what_cannot_be_measured_is_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["encoder", "--device", "cpu", "--sides", "eager", *flags]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.count("\n") == 1
    assert flags[1].rpartition(",")[2] in error


def test_every_workload_is_made() -> None:
    for name in WORKLOADS:
        assert make_workload(name, PREPROCESSOR, repeats=6).name == name

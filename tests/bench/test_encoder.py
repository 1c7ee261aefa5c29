from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from models import BatchResult, Patches, Preprocessor, VisionEncoder, random_checkpoint
from service.bench import command as bench
from service.bench.encoder import arithmetic
from service.bench.profiling import Kernel, format_kernels, kernels_of
from service.bench.sides import make_side
from service.bench.timing import time_submitted
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
def test_batches_have_the_sizes_of_the_workload(name: str, images: int, num_patches: int) -> None:
    workload = make_workload(name, PREPROCESSOR, repeats=2)
    batches = list(workload.images(PREPROCESSOR))
    assert len(batches) == workload.num_warmup + 2
    for batch in batches:
        assert len(batch) == images
        assert sum(len(image.pixels) for image in batch) == num_patches
        assert all(image.pixels.shape == (image.grid_thw[1] * image.grid_thw[2], 768) for image in batch)


def test_trace_has_the_published_sizes() -> None:
    workload = make_workload("trace", PREPROCESSOR, repeats=6)
    sizes = [height * width for ((height, width),) in workload.batches]
    assert sizes == [8836, 15376, 24336, 35344, 47380, 62500] * 2


@pytest.mark.parametrize(("name", "usual"), [("random-mm", 20), ("stream", 300), ("1x336", 3)])
def test_repeats_limit_the_warm_up(name: str, usual: int) -> None:
    assert make_workload(name, PREPROCESSOR).num_warmup == usual
    for repeats in (1, 400):
        workload = make_workload(name, PREPROCESSOR, repeats)
        assert workload.num_warmup == (3 if name == "1x336" else min(repeats, usual))
        assert len(workload.batches) == workload.num_warmup + repeats


def test_stream_has_usual_sizes() -> None:
    workload = make_workload("stream", PREPROCESSOR)
    assert len(workload.batches) == 3300
    tokens = torch.tensor([height * width / 4 for ((height, width),) in workload.batches])
    assert 330 < tokens.median() < 380
    assert 1000 < tokens.quantile(0.99) < 1200  # near one megapixel


def test_arithmetic_equals_a_count_by_hand() -> None:
    vision = EIGHT_B.vision
    linear = 27 * (4 * 1152 * 1152 + 2 * 1152 * 4304) * 400
    attention = 27 * 2 * 400 * 400 * 1152
    mergers = 4 * 100 * (4608 * 4608 + 4608 * 4096)
    assert arithmetic(patches(20, 20), vision) == 2 * (linear + attention + mergers + 400 * 768 * 1152)


def test_benchmark_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    flags = "--size demo --workloads 1x336,random-mm --sides transformers,eager --repeats 1 --dtype float32"
    assert bench.main(["encoder", *flags.split(), "--device", "cpu", "--json", str(report)]) == 0
    content = json.loads(report.read_text())
    rows = {(row["workload"], row["side"]): row for row in content["rows"]}
    assert len(rows) == 4
    for (workload, _), row in rows.items():
        assert row["batches"] == 1
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        images = 20 if workload == "random-mm" else 1
        assert row["images_per_s"] == pytest.approx(images * 1e3 / row["mean_ms"])
        assert row["utilisation"] > 0
        assert row["padded_share"] == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + 4 + 1
    assert content["product_flops"] > 0


def test_profile_lists_the_operations_of_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    flags = "--size demo --workloads 1x336 --sides eager --repeats 1 --dtype float32 --profile"
    assert bench.main(["encoder", *flags.split(), "--device", "cpu", "--json", str(report)]) == 0
    (row,) = json.loads(report.read_text())["rows"]
    kernels = {kernel["name"]: kernel for kernel in row["kernels"]}
    vision = random_checkpoint("demo").vision
    norms = 2 * vision.depth + 1 + len(vision.deepstack_visual_indexes)
    assert kernels["aten::native_layer_norm"]["calls"] == norms
    times = [kernel["ms"] for kernel in row["kernels"]]
    assert times == sorted(times, reverse=True)
    assert times[-1] > 0
    assert sum(times) < 5 * row["mean_ms"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 1 + 1 + len(kernels) + 1
    assert lines[3].endswith(row["kernels"][0]["name"])


def event(key: str, count: int, cpu_us: float, device_us: float) -> SimpleNamespace:
    return SimpleNamespace(key=key, count=count, self_cpu_time_total=cpu_us, self_device_time_total=device_us)


@pytest.mark.parametrize(
    ("device", "kernels"),
    [
        ("cuda", [Kernel("attention", 27, 3.0), Kernel("norm", 54, 1.0)]),
        ("cpu", [Kernel("launch", 81, 0.4), Kernel("norm", 54, 0.2)]),
    ],
)
def test_kernels_are_counted_for_one_batch(device: str, kernels: list[Kernel]) -> None:
    events = [
        event("norm", 270, 1000.0, 5000.0),
        event("launch", 405, 2000.0, 0.0),
        event("attention", 135, 0.0, 15000.0),
    ]
    assert kernels_of(events, torch.device(device)) == kernels


def test_list_of_kernels_has_shares_times_and_calls() -> None:
    assert format_kernels([Kernel("attention", 24, 3.0), Kernel("n" * 100, 50, 1.0)]).splitlines() == [
        "  4.000 ms of kernels",
        "   75.0%     3.000 ms     24 ×   125.00 µs  attention",
        "   25.0%     1.000 ms     50 ×    20.00 µs  " + "n" * 76,
    ]


def test_replicas_are_measured_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    flags = "--size demo --workloads 1x336,4x336 --sides transformers,eager --repeats 2 --dtype float32"
    replicas = ["--device", "cpu", "--replicas", "2", "--json", str(report)]
    assert bench.main(["encoder", *flags.split(), *replicas]) == 0
    rows = {(row["workload"], row["side"]): row for row in json.loads(report.read_text())["rows"]}
    assert list(rows) == [
        (workload, side) for side in ("transformers", "eager") for workload in ("1x336", "4x336")
    ]
    for (workload, side), row in rows.items():
        assert row["batches"] == 2
        assert row["images_per_s"] == pytest.approx(int(workload[0]) * 1e3 / row["mean_ms"])
        assert row["padded_share"] == 0
        assert row["utilisation"] > 0
        # Replicas work in their own threads, so no call has their processor time.
        assert (row["cpu_ms"] is None) == (side == "eager")
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4 + 1


def test_replicas_give_the_vectors_of_one_encoder_in_order_and_end_when_closed() -> None:
    checkpoint = random_checkpoint("demo")
    side = make_side(
        "eager",
        checkpoint,
        torch.device("cpu"),
        torch.float32,
        attn_backend="auto",
        budget_steps=4,
        num_replicas=2,
    )
    threads = threading.active_count()
    images = [
        Patches(torch.full((n * n, 768), 9 * n, dtype=torch.uint8), (1, n, n), n * n // 4) for n in (8, 4, 6)
    ]
    assert side.submit is not None
    result = side.submit(images).result()
    assert side.num_devices == 2
    assert len({stats.device for stats in result.stats}) == 2
    encoder = VisionEncoder(checkpoint, torch.device("cpu"), dtype=torch.float32)
    for vector, tokens in zip(result.embeddings, encoder.encode(images), strict=True):
        mean = tokens[:, : encoder.hidden_size].mean(dim=0)
        torch.testing.assert_close(vector, mean / mean.norm(), rtol=1e-4, atol=1e-5)
    side.close()
    assert threading.active_count() < threads


class Submitted(Future[BatchResult]):
    """A batch that runs until its result is asked for."""

    def __init__(self, running: set[Future[BatchResult]]) -> None:
        super().__init__()
        self._running = running
        running.add(self)

    def result(self, timeout: float | None = None) -> BatchResult:
        self._running.remove(self)
        return BatchResult((), (), 0.0, 0.0)


@pytest.mark.parametrize("max_submitted", [1, 3, 9])
def test_replicas_have_at_most_max_submitted_batches(max_submitted: int) -> None:
    running: set[Future[BatchResult]] = set()
    most = []

    def submit(batch: Sequence[Patches]) -> Submitted:
        submitted = Submitted(running)
        most.append(len(running))
        return submitted

    times_s = time_submitted(submit, [[]] * 7, max_submitted)
    assert len(times_s) == 7
    assert all(seconds >= 0 for seconds in times_s)
    assert max(most) == min(7, max_submitted)
    assert not running


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
        ["--profile", "--replicas", "2"],
    ],
)
def test_unusable_flag_is_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["encoder", "--device", "cpu", "--sides", "eager", *flags]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.count("\n") == 1
    assert flags[1].rpartition(",")[2] in error


def test_every_workload_can_be_made() -> None:
    for name in WORKLOADS:
        assert make_workload(name, PREPROCESSOR, repeats=6).name == name

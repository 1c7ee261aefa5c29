"""Measures the encoder alone: several implementations (sides) on the same batches.

Utilisation is the arithmetic of the real tokens, divided by the rate of a large matrix product in the same
run. It needs no server.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np
import torch

from models import (
    RANDOM_SIZES,
    Checkpoint,
    CudaGraphSettings,
    ModelError,
    Patches,
    Preprocessor,
    VisionConfig,
    find_device,
    open_checkpoint,
    random_checkpoint,
    replica_devices,
)
from service.answers.dtypes import TORCH_DTYPES
from service.bench.profiling import Kernel, format_kernels, profile_kernels
from service.bench.sides import SIDES, Side, make_side
from service.bench.timing import (
    cpu_seconds,
    product_rate,
    time_on_device,
    time_submitted,
    time_whole,
)
from service.bench.workloads import WORKLOADS, Workload, make_workload
from service.engine.replicas import use_cores_for_requests

MAX_SUBMITTED = 4  # batches that replicas have at the same time, if the workload does not wait for each


@dataclass(frozen=True)
class Row:
    """The figures of one side on one workload. Times are milliseconds per batch."""

    workload: str
    side: str
    attn_backend: str
    timing: str
    batches: int
    mean_ms: float
    p50_ms: float
    p99_ms: float
    images_per_s: float
    padded_share: float  # of the computed tokens
    utilisation: float
    cpu_ms: float | None  # median processor time of the process in a call of `encode`; None with replicas
    kernels: Sequence[Kernel] = ()  # of the first batch, with --profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench encoder`."""
    parser.add_argument("--model", help="hub id or local folder [random weights]")
    parser.add_argument(
        "--size", default="8B", help="size of the model with random weights: 2B, 8B or demo [8B]"
    )
    parser.add_argument(
        "--workloads", default=",".join(WORKLOADS), help=f"comma-separated [{','.join(WORKLOADS)}]"
    )
    parser.add_argument(
        "--sides", default=",".join(SIDES), help=f"implementations, comma-separated [{','.join(SIDES)}]"
    )
    parser.add_argument(
        "--attn-backend",
        default="auto",
        help="attention implementation of our sides; auto takes the fastest [auto]",
    )
    parser.add_argument(
        "--dtype", choices=TORCH_DTYPES, default="bfloat16", help="data type of the computation [bfloat16]"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [auto]")
    steps = CudaGraphSettings.budget_steps
    parser.add_argument(
        "--budget-steps",
        type=_positive,
        default=steps,
        help=f"token budgets from one size to twice that size [{steps}]",
    )
    parser.add_argument(
        "--replicas",
        type=_positive,
        help="run our sides on this many replicas, and copy the vectors to the host [one encoder]",
    )
    parser.add_argument(
        "--profile", action="store_true", help="also list the kernels of the first batch of each workload"
    )
    parser.add_argument(
        "--repeats", type=_positive, help="measured batches of each workload [depends on the workload]"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints. Returns the exit code."""
    sides, names = arguments.sides.split(","), arguments.workloads.split(",")
    choices = {
        "--sides": (sides, SIDES),
        "--workloads": (names, WORKLOADS),
        "--size": ([arguments.size], RANDOM_SIZES),
    }
    for flag, (given, allowed) in choices.items():
        for name in given:
            if name not in allowed:
                return _refuse(f"{flag}: unknown name {name!r} (choose from {', '.join(allowed)})")
    try:
        model = arguments.model
        checkpoint = open_checkpoint(model) if model else random_checkpoint(arguments.size)
        device = find_device(arguments.device)
        replica_devices(device.type, arguments.replicas or 1)  # raises if there are too few
        if arguments.profile and arguments.replicas and device.type == "cpu":
            raise ModelError(
                "--profile with --replicas needs GPUs"
            )  # on a CPU the profiler sees one thread only
        report = _open_report(arguments.json)
    except (ModelError, OSError) as error:
        return _refuse(str(error))
    use_cores_for_requests([device])
    preprocessor = Preprocessor(checkpoint.preprocess)
    workloads = [make_workload(name, preprocessor, arguments.repeats) for name in names]
    with report, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        json.dump(_measure(arguments, checkpoint, device, sides, workloads), report, indent=1)
    return 0


def _refuse(text: str) -> int:
    sys.stderr.write(f"vision-sidecar bench: {text}\n")
    return 2


def _open_report(path: Path | None) -> IO[str]:
    """Opens the file of the report, before the measurement: a bad path must be an error at once."""
    return (Path(os.devnull) if path is None else path).open("w")


def _measure(
    arguments: argparse.Namespace,
    checkpoint: Checkpoint,
    device: torch.device,
    sides: Sequence[str],
    workloads: Sequence[Workload],
) -> dict[str, object]:
    dtype = TORCH_DTYPES[arguments.dtype]
    preprocessor = Preprocessor(checkpoint.preprocess)
    rows: list[Row] = []
    rates: list[float] = []
    starts: dict[str, object] = {}
    sys.stdout.write(HEADER)
    for name in sides:
        side = make_side(
            name,
            checkpoint,
            device,
            dtype,
            attn_backend=arguments.attn_backend,
            budget_steps=arguments.budget_steps,
            num_replicas=arguments.replicas,
        )
        starts[name] = asdict(side.start)
        for workload in workloads:
            rates.append(product_rate(device, dtype))
            row = measure(side, workload, preprocessor, checkpoint.vision, device, rates[-1])
            if arguments.profile:
                batch = next(workload.images(preprocessor, pin_memory=device.type == "cuda"))
                row = replace(row, kernels=profile_kernels(side, batch, device))
            rows.append(row)
            sys.stdout.write(format_row(row))
            sys.stdout.flush()
        side.close()
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    rate = float(np.median(rates))
    sys.stdout.write(f"{hardware}, torch {torch.__version__}, product {rate / 1e12:.0f} TFLOP/s (median)\n")
    return {
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "hardware": hardware,
        "torch": torch.__version__,
        "vision": asdict(checkpoint.vision),
        "product_flops": rate,
        "starts": starts,
        "rows": [asdict(row) for row in rows],
    }


def measure(
    side: Side,
    workload: Workload,
    preprocessor: Preprocessor,
    vision: VisionConfig,
    device: torch.device,
    rate: float,
) -> Row:
    """Measures one side on one workload. `rate` is that of the matrix product, in operations per second."""
    batches = workload.images(preprocessor, pin_memory=device.type == "cuda")
    for batch in islice(batches, workload.num_warmup):
        side.encode(batch)
        side.wait()
    counted = list(batches)
    padding = side.padding()
    cpu_s: list[float] = []
    if side.submit is not None:
        times_s = time_submitted(side.submit, counted, MAX_SUBMITTED if workload.timing == "device" else 1)
    elif workload.timing == "device" and device.type == "cuda":
        times_s = time_on_device(side, counted)
    else:
        times_s, cpu_s = time_whole(side, counted)
    padding = side.padding() - padding  # of the counted batches only
    if side.submit is None and not cpu_s:
        cpu_s = [cpu_seconds(side, counted[-1]) for _ in range(5)]
    images = [image for batch in counted for image in batch]
    tokens = sum(image.num_tokens for image in images)
    total_s, times_ms = sum(times_s), np.array(times_s) * 1e3
    return Row(
        workload=workload.name,
        side=side.name,
        attn_backend=side.attn_backend,
        timing=workload.timing,
        batches=len(times_s),
        mean_ms=float(times_ms.mean()),
        p50_ms=float(np.percentile(times_ms, 50)),
        p99_ms=float(np.percentile(times_ms, 99)),
        images_per_s=len(images) / total_s,
        padded_share=padding / (tokens + padding),
        utilisation=sum(arithmetic(image, vision) for image in images) / total_s / rate / side.num_devices,
        cpu_ms=float(np.median(cpu_s)) * 1e3 if cpu_s else None,
    )


def arithmetic(image: Patches, vision: VisionConfig) -> int:
    """Operations of one image: a multiply and an add for each product; norms and activations do not count."""
    n, tokens = len(image.pixels), image.num_tokens
    hidden, merged = vision.hidden_size, vision.hidden_size * vision.spatial_merge_size**2
    block = 2 * n * (4 * hidden**2 + 2 * hidden * vision.intermediate_size) + 4 * n**2 * hidden
    merger = 2 * tokens * (merged**2 + merged * vision.out_hidden_size)
    levels = 1 + len(vision.deepstack_visual_indexes)
    return vision.depth * block + levels * merger + 2 * n * vision.patch_dim * hidden


HEADER = (
    f"{'workload':<10} {'side':<13} {'attention':<13} {'mean ms':>9} {'P50 ms':>9} {'P99 ms':>9} "
    f"{'images/s':>9} {'padded':>7} {'util':>6} {'CPU ms':>8}\n"
)


def format_row(row: Row) -> str:
    """One line of the table, and the kernels below it if there are any."""
    line = (
        f"{row.workload:<10} {row.side:<13} {row.attn_backend:<13} {row.mean_ms:>9.3f} {row.p50_ms:>9.3f} "
        f"{row.p99_ms:>9.3f} {row.images_per_s:>9.1f} {row.padded_share:>7.1%} {row.utilisation:>6.3f} "
        f"{'-' if row.cpu_ms is None else format(row.cpu_ms, '.2f'):>8}\n"
    )
    return line + format_kernels(row.kernels) if row.kernels else line

"""Where `bench encoder` says the time of a batch goes: its kernels, by name.

On a CPU they are torch's operations. Knows sides and batches; nothing of what they stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from models import Patches
from service.bench.sides import Side

BATCHES = 5
MAX_NAME = 76  # a kernel's template arguments can take lines


@dataclass(frozen=True)
class Kernel:
    """All runs of one kernel in one batch. Copies count as kernels."""

    name: str
    calls: float
    ms: float


def profile_kernels(side: Side, batch: Sequence[Patches], device: torch.device) -> list[Kernel]:
    """Those of one batch, the costliest first. Of replicas they are the sums over all devices.

    Kernels that run at the same time, as uploads do, count in full.
    """
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as recorded:
        for _ in range(BATCHES):
            side.encode(batch)
        side.wait()
    kernels = [
        Kernel(event.key, event.count / BATCHES, _self_us(event, device) / BATCHES / 1e3)
        for event in recorded.key_averages()
    ]
    return sorted((kernel for kernel in kernels if kernel.ms > 0), key=lambda kernel: -kernel.ms)


def _self_us(event: torch.autograd.profiler_util.FunctionEventAvg, device: torch.device) -> float:
    used = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
    return float(used)


def format_kernels(kernels: Sequence[Kernel]) -> str:
    """A line for each: its share of the sum, milliseconds and calls of a batch, microseconds of a call."""
    total = sum(kernel.ms for kernel in kernels)
    lines = [f"  {total:.3f} ms of kernels\n"]
    lines += [
        f"  {kernel.ms / total:>6.1%} {kernel.ms:>9.3f} ms {kernel.calls:>6g} × "
        f"{kernel.ms / kernel.calls * 1e3:>8.2f} µs  {kernel.name[:MAX_NAME]}\n"
        for kernel in kernels
    ]
    return "".join(lines)

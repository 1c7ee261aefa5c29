"""The kernels that a batch runs, with their times. On a CPU they are operations of torch.

Knows sides and batches. Knows nothing of their content.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from models import Patches
from service.bench.sides import Side

BATCHES = 5
MAX_NAME = 76  # characters; the template arguments of a kernel can fill several lines


@dataclass(frozen=True)
class Kernel:
    """All runs of one kernel in a batch. Copies count as kernels."""

    name: str
    calls: float
    ms: float


class Event(Protocol):
    """The profiler's sums over all runs of one kernel or operation. Times are in microseconds."""

    key: str
    count: int
    self_cpu_time_total: float
    self_device_time_total: float


def profile_kernels(side: Side, batch: Sequence[Patches], device: torch.device) -> list[Kernel]:
    """The kernels of one batch, the slowest first. With replicas on GPUs, sums over all of them.

    Kernels that run at the same time, such as uploads, count in full.
    """
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as recorded:  # without it, torch 2.11 warns
        for _ in range(BATCHES):
            side.encode(batch)
        side.wait()
    return kernels_of(recorded.key_averages(), device)


def kernels_of(events: Iterable[Event], device: torch.device) -> list[Kernel]:
    """The kernels of one batch, the slowest first. `events` are sums over `BATCHES` batches."""

    def used_us(event: Event) -> float:
        return event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total

    kernels = [
        Kernel(event.key, event.count / BATCHES, used_us(event) / BATCHES / 1e3)
        for event in events
        if used_us(event) > 0
    ]
    return sorted(kernels, key=lambda kernel: -kernel.ms)


def format_kernels(kernels: Sequence[Kernel]) -> str:
    """A line for each kernel: its share of the time, ms and calls per batch, and µs per call."""
    total = sum(kernel.ms for kernel in kernels)
    lines = [f"  {total:.3f} ms of kernels\n"]
    lines += [
        f"  {kernel.ms / total:>6.1%} {kernel.ms:>9.3f} ms {kernel.calls:>6g} × "
        f"{kernel.ms / kernel.calls * 1e3:>8.2f} µs  {kernel.name[:MAX_NAME]}\n"
        for kernel in kernels
    ]
    return "".join(lines)

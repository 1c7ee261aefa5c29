"""How `bench encoder` takes times: by the device, of whole calls, and of batches that replicas have at once.

Knows sides and batches; nothing of what they stand for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise

import numpy as np
import torch

from models import BatchResult, Patches
from service.bench.sides import Side

PRODUCT = 8192  # rows, columns and depth of the product that utilisation is measured against

Batches = Sequence[Sequence[Patches]]


def time_on_device(side: Side, batches: Batches) -> list[float]:
    """Seconds of each batch by the device's clock, while batches follow each other."""
    marks = [_mark()]
    for batch in batches:
        side.encode(batch)
        marks.append(_mark())
    side.wait()
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(marks)]


def time_whole(side: Side, batches: Batches) -> tuple[list[float], list[float]]:
    """Seconds of each batch, host work included, each waited for; and those that the processors worked.

    The latter until the call returns: what follows is waiting for the device.
    """
    times_s: list[float] = []
    cpu_s: list[float] = []
    for batch in batches:
        started, cpu_started = time.perf_counter(), time.process_time()
        side.encode(batch)
        cpu_s.append(time.process_time() - cpu_started)
        side.wait()
        times_s.append(time.perf_counter() - started)
    return times_s, cpu_s


def time_submitted(
    submit: Callable[[Sequence[Patches]], Future[BatchResult]], batches: Batches, max_submitted: int
) -> list[float]:
    """Seconds of each batch until its results are on the host, since its start or the last one's end.

    Up to `max_submitted` batches are with the devices at once; 1: each is waited for.
    """
    times_s: list[float] = []
    running: deque[tuple[float, Future[BatchResult]]] = deque()
    ended = 0.0

    def finish() -> None:
        nonlocal ended
        started, batch = running.popleft()
        batch.result()
        now = time.perf_counter()
        times_s.append(now - max(ended, started))
        ended = now

    for batch in batches:
        running.append((time.perf_counter(), submit(batch)))
        if len(running) == max_submitted:
            finish()
    while running:
        finish()
    return times_s


def cpu_seconds(side: Side, batch: Sequence[Patches]) -> float:
    """Processor time of one call on an idle device, until it returns."""
    started = time.process_time()
    side.encode(batch)
    spent = time.process_time() - started
    side.wait()
    return spent


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large matrix product of random values, sustained as the workloads are.

    The median of products that follow each other for some time: a GPU's clock falls under steady load, and a
    short burst would promise a rate that no long computation reaches.
    """
    size, count = (PRODUCT, 400) if device.type == "cuda" else (1024, 5)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    if device.type == "cuda":
        marks = [_mark()]
        for _ in range(count):
            torch.mm(a, b)
            marks.append(_mark())
        torch.cuda.synchronize(device)
        times_s = [start.elapsed_time(end) / 1e3 for start, end in pairwise(marks)]
    else:
        times_s = [_seconds(a, b) for _ in range(count)]
    return 2 * size**3 / float(np.median(times_s[count // 2 :]))


def _seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    started = time.perf_counter()
    torch.mm(a, b)
    return time.perf_counter() - started


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event

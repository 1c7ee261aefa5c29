"""How `bench encoder` measures times: by the clock of the device, of whole calls, or of submitted batches.

Knows sides and batches. Knows nothing of their content.
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

PRODUCT = 8192  # rows, columns and depth of the matrix product on a GPU

Batches = Sequence[Sequence[Patches]]


def time_on_device(side: Side, batches: Batches) -> list[float]:
    """Seconds of each batch by the clock of the device, without a pause between batches."""
    marks = [_mark()]
    for batch in batches:
        side.encode(batch)
        marks.append(_mark())
    side.wait()
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(marks)]


def time_whole(side: Side, batches: Batches) -> tuple[list[float], list[float]]:
    """Wall seconds of each batch, host work included, and its processor seconds. Waits for each batch.

    Processor time is counted until `encode` returns. After that, the process only waits for the device.
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
    """Seconds of each batch until its results are on the host.

    A batch counts from its start, or from the end of the batch before if that is later. Up to `max_submitted`
    batches run at the same time.
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
    """Processor seconds of one call of `encode` on an idle device."""
    started = time.process_time()
    side.encode(batch)
    spent = time.process_time() - started
    side.wait()
    return spent


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large matrix product of random values, under steady load.

    Takes the median of many products without a pause: the clock of a GPU falls under steady load, and no long
    computation reaches the rate of a short burst.
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

"""Measures work: its time, scaled to a machine of known speed, and its peak of memory."""

from __future__ import annotations

import functools
import random
import re
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

_NOMINAL_S = 0.06  # the time in `slowness` on the machine for which limits of time were chosen
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # Linux only


def growth(work: Callable[[int], object], size: int) -> float:
    """The CPU time for four times the size, divided by the time for the size: 4 if the work is linear.

    Takes the fastest of several runs of each, so that a busy machine does not count.
    """
    return _least_cpu_s(functools.partial(work, 4 * size)) / _least_cpu_s(functools.partial(work, size))


def _least_cpu_s(action: Callable[[], object]) -> float:
    durations = []
    for _ in range(7):
        started = time.thread_time()
        action()
        durations.append(time.thread_time() - started)
    return min(durations)


class Measured(NamedTuple, Generic[T]):
    """A result and its cost."""

    result: T
    seconds: float  # of wall time, divided by the machine's slowness
    peak_growth_bytes: int  # above the resident memory before; 0 if the system does not report it


def measure(action: Callable[[], T], *, max_seconds: float) -> Measured[T]:
    """Runs the action until it keeps the limit, up to three times because the machine may be busy."""
    for _ in range(3):
        measured = _measure_once(action)
        if measured.seconds < max_seconds:
            break
    return measured


def _measure_once(action: Callable[[], T]) -> Measured[T]:
    before = _reset_peak()
    started = time.perf_counter()
    result = action()
    seconds = (time.perf_counter() - started) / slowness()
    return Measured(result, seconds, _status_bytes("VmHWM") - before)


@functools.cache
def slowness() -> float:
    """How many times slower than nominal this machine is; never less than 1."""
    data = random.Random(1).randbytes(1 << 14) * 1000
    durations = []
    for _ in range(3):
        started = time.perf_counter()
        zlib.compress(data, 6)
        durations.append(time.perf_counter() - started)
    return max(1.0, min(durations) / _NOMINAL_S)


def _reset_peak() -> int:
    """Resets the peak of resident memory to the memory that is resident now, and returns it."""
    if _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text("5")
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    if not _STATUS.exists():
        return 0
    found = re.search(rf"{name}:\s+(\d+) kB", _STATUS.read_text())
    return int(found[1]) * 1024 if found else 0

from __future__ import annotations

import mmap
import time
from functools import partial

import pytest

from tests.support.measuring import _CLEAR_REFS, measure, slowness


def test_work_is_repeated_until_it_keeps_the_limit_of_time() -> None:
    pauses = [0.2, 0.0, 0.2]
    measured = measure(lambda: time.sleep(pauses.pop(0)), max_seconds=0.1)
    assert measured.seconds < 0.1
    assert pauses == [0.2]
    assert slowness() >= 1


def test_work_that_is_always_slow_is_measured_as_slow() -> None:
    assert measure(lambda: time.sleep(0.1 * slowness()), max_seconds=0.05).seconds > 0.09


def fill_pages(size: int) -> int:
    """Allocates fresh pages, fills and frees them. A malloc might reuse resident memory."""
    with mmap.mmap(-1, size) as pages:
        for start in range(0, size, mmap.PAGESIZE):
            pages[start] = 1
        return size


@pytest.mark.skipif(not _CLEAR_REFS.exists(), reason="only Linux reports it")
def test_memory_that_was_freed_counts_at_its_peak() -> None:
    for size in (100_000_000, 50_000_000):
        measured = measure(partial(fill_pages, size), max_seconds=9)
        assert 0.9 < measured.peak_growth_bytes / size < 1.2

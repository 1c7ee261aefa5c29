from __future__ import annotations

import mmap
import time
from functools import partial

import pytest

from tests.support.measuring import _CLEAR_REFS, measure, slowness


def test_time_is_measured_and_a_limit_that_is_kept_ends_the_tries() -> None:
    pauses = [0.2, 0.0, 0.2]
    measured = measure(lambda: time.sleep(pauses.pop(0)), max_seconds=0.1)
    assert measured.seconds < 0.1
    assert pauses == [0.2]
    assert slowness() >= 1


def test_what_is_always_slow_stays_so() -> None:
    assert measure(lambda: time.sleep(0.1 * slowness()), max_seconds=0.05).seconds > 0.09


def fill_pages(size: int) -> int:
    """Takes fresh pages, fills them and gives them back. A malloc may reuse what is resident already."""
    with mmap.mmap(-1, size) as pages:
        for start in range(0, size, mmap.PAGESIZE):
            pages[start] = 1
        return size


@pytest.mark.skipif(not _CLEAR_REFS.exists(), reason="only Linux tells")
def test_memory_that_is_given_back_counts_at_its_peak() -> None:
    for size in (100_000_000, 50_000_000):
        measured = measure(partial(fill_pages, size), max_seconds=9)
        assert 0.9 < measured.peak_growth_bytes / size < 1.2

from __future__ import annotations

import time

import pytest

from tests.measuring import _CLEAR_REFS, measure, slowness


def test_time_is_measured_and_a_limit_that_is_kept_ends_the_tries() -> None:
    pauses = [0.2, 0.0, 0.2]
    measured = measure(lambda: time.sleep(pauses.pop(0)), max_seconds=0.1)
    assert measured.seconds < 0.1
    assert pauses == [0.2]
    assert slowness() >= 1


def test_what_is_always_slow_stays_so() -> None:
    assert measure(lambda: time.sleep(0.1 * slowness()), max_seconds=0.05).seconds > 0.09


@pytest.mark.skipif(not _CLEAR_REFS.exists(), reason="only Linux tells")
def test_memory_that_is_given_back_counts_at_its_peak() -> None:
    for size in (100_000_000, 50_000_000):
        # What other threads give back meanwhile hides a growth, so one try of three must see it.
        tries = [measure(lambda size=size: len(b"x" * size), max_seconds=9) for _ in range(3)]  # type: ignore[misc]
        assert any(0.9 < measured.peak_growth_bytes / size < 1.2 for measured in tries)

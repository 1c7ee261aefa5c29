from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.budgets import (
    BudgetError,
    check_budgets,
    check_max_images,
    infer_budgets,
    infer_max_images,
    infer_warm_up,
)

EXAMPLES = settings(max_examples=300, derandomize=True, deadline=None)


def test_one_step_per_octave_gives_the_published_powers_of_two() -> None:
    assert infer_budgets(64, 16384, 1) == (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def test_steps_divide_each_octave_evenly() -> None:
    assert infer_budgets(64, 300, 4) == (64, 80, 96, 112, 128, 160, 192, 224, 256, 300)


@pytest.mark.parametrize(("smallest", "largest"), [(64, 64), (64, 65), (1, 7), (100, 12345)])
def test_budgets_start_at_the_smallest_and_end_at_the_largest(smallest: int, largest: int) -> None:
    for steps in (1, 3, 8):
        budgets = infer_budgets(smallest, largest, steps)
        assert budgets[0] == smallest
        assert budgets[-1] == largest
        assert list(budgets) == sorted(set(budgets))


@given(st.integers(1, 500), st.integers(1, 20_000), st.integers(1, 16))
@EXAMPLES
def test_neighbouring_budgets_are_at_most_one_step_apart(smallest: int, more: int, steps: int) -> None:
    budgets = infer_budgets(smallest, smallest + more, steps)
    for low, high in pairwise(budgets):
        assert high - low <= low // steps + 1


@pytest.mark.parametrize(
    ("smallest", "largest", "steps", "message"),
    [(64, 63, 1, "between 64 and 63"), (0, 5, 1, "between 0 and 5"), (64, 128, 0, "steps per octave")],
)
def test_invalid_ranges_and_steps_are_errors(smallest: int, largest: int, steps: int, message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        infer_budgets(smallest, largest, steps)


@pytest.mark.parametrize(
    ("smallest", "largest", "above", "expected"),
    [
        (1024, 16384, 0, (1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096)),
        (1024, 2000, 0, (1024, 1280, 1536, 1792, 2000)),
        (1024, 16384, 2048, (2560, 3072, 3584, 4096)),
        (1024, 16384, 4096, ()),
        (64, 64, 0, (64,)),
        (5000, 9000, 0, (5000,)),
        (64, 1024, 1024, ()),
    ],
)
def test_warm_up_covers_sizes_until_kernels_no_longer_change(
    smallest: int, largest: int, above: int, expected: tuple[int, ...]
) -> None:
    assert infer_warm_up(smallest, largest, above) == expected


def test_explicit_budgets_are_sorted() -> None:
    assert check_budgets([512, 64, 128], smallest=64) == (64, 128, 512)


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        ([], "no token budget"),
        ([64, 64], "list a budget twice"),
        ([32, 64], "32 is under the model's smallest image, 64"),
    ],
)
def test_invalid_budgets_are_errors(budgets: list[int], message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        check_budgets(budgets, smallest=64)


@pytest.mark.parametrize(
    ("budgets", "smallest", "expected"),
    [((64, 16384), 64, 64), ((512, 1024), 64, 16), ((64,), 64, 1), ((3, 100), 1, 3), ((64, 100), 80, 1)],
)
def test_limit_on_images_is_inferred(budgets: tuple[int, ...], smallest: int, expected: int) -> None:
    assert infer_max_images(budgets, smallest) == expected


@pytest.mark.parametrize(
    ("max_images", "message"),
    [
        (0, "must be 1 to the smallest budget, 64, not 0"),
        (65, "must be 1 to the smallest budget, 64, not 65"),
        (17, "17 images per batch never fit the largest budget of 1024 tokens"),
    ],
)
def test_limit_on_images_that_contradicts_the_budgets_is_an_error(max_images: int, message: str) -> None:
    assert check_max_images(16, (64, 1024), 64) == 16
    with pytest.raises(BudgetError, match=message):
        check_max_images(max_images, (64, 1024), 64)

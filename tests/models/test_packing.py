from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.packing import (
    BudgetError,
    check_budgets,
    check_max_images,
    get_load_balance_assignment,
    infer_budgets,
    infer_max_images,
    infer_warm_up,
    plan,
)

EXAMPLES = settings(max_examples=300, derandomize=True, deadline=None)


def test_one_step_gives_the_published_powers_of_two() -> None:
    assert infer_budgets(64, 16384, 1) == (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def test_steps_cut_each_octave_evenly() -> None:
    assert infer_budgets(64, 300, 4) == (64, 80, 96, 112, 128, 160, 192, 224, 256, 300)


@pytest.mark.parametrize(("smallest", "largest"), [(64, 64), (64, 65), (1, 7), (100, 12345)])
def test_the_largest_budget_is_always_included(smallest: int, largest: int) -> None:
    for steps in (1, 3, 8):
        budgets = infer_budgets(smallest, largest, steps)
        assert budgets[0] == smallest
        assert budgets[-1] == largest
        assert list(budgets) == sorted(set(budgets))


@given(st.integers(1, 500), st.integers(1, 20_000), st.integers(1, 16))
@EXAMPLES
def test_neighbouring_budgets_are_never_further_apart_than_a_step(
    smallest: int, more: int, steps: int
) -> None:
    budgets = infer_budgets(smallest, smallest + more, steps)
    for low, high in pairwise(budgets):
        assert high - low <= low // steps + 1


@pytest.mark.parametrize(
    ("smallest", "largest", "steps", "message"),
    [(64, 63, 1, "from 64 to 63"), (0, 5, 1, "from 0 to 5"), (64, 128, 0, "steps per octave")],
)
def test_ranges_that_make_no_sense_are_errors(smallest: int, largest: int, steps: int, message: str) -> None:
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
def test_sizes_are_warmed_up_until_kernels_are_the_same(
    smallest: int, largest: int, above: int, expected: tuple[int, ...]
) -> None:
    assert infer_warm_up(smallest, largest, above) == expected


def test_explicit_budgets_are_sorted() -> None:
    assert check_budgets([512, 64, 128], smallest=64) == (64, 128, 512)


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        ([], "no token budget"),
        ([64, 64], "one twice"),
        ([32, 64], "32 is under the model's smallest image, 64"),
    ],
)
def test_budgets_that_cannot_serve_are_errors(budgets: list[int], message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        check_budgets(budgets, smallest=64)


@pytest.mark.parametrize(
    ("budgets", "smallest", "expected"),
    [((64, 16384), 64, 64), ((512, 1024), 64, 16), ((64,), 64, 1), ((3, 100), 1, 3), ((64, 100), 80, 1)],
)
def test_images_per_batch_are_inferred(budgets: tuple[int, ...], smallest: int, expected: int) -> None:
    assert infer_max_images(budgets, smallest) == expected


@pytest.mark.parametrize(
    ("max_images", "message"),
    [
        (0, "must be 1 to the smallest budget, 64, not 0"),
        (65, "must be 1 to the smallest budget, 64, not 65"),
        (17, "17 images per batch never fit the largest budget of 1024 tokens"),
    ],
)
def test_a_limit_on_images_that_contradicts_the_budgets_is_an_error(max_images: int, message: str) -> None:
    assert check_max_images(16, (64, 1024), 64) == 16
    with pytest.raises(BudgetError, match=message):
        check_max_images(max_images, (64, 1024), 64)


@pytest.mark.parametrize(
    ("tokens", "budget"), [([1], 64), ([64], 64), ([65], 100), ([100], 100), ([1, 1], 100), ([1, 1, 1], 300)]
)
def test_the_smallest_budget_that_holds_tokens_and_images_is_taken(tokens: list[int], budget: int) -> None:
    ((taken, _),) = plan(tokens, {64: 1, 100: 2, 300: 4}).replays
    assert taken == budget


def test_images_are_packed_smallest_first() -> None:
    packed = plan([300, 64, 100, 64, 500, 1000], {128: 8, 256: 8, 512: 8})
    assert packed.replays == ((256, (1, 3, 2)), (512, (0,)), (512, (4,)))
    assert packed.oversize == (5,)


def test_the_limit_on_images_closes_a_sub_batch() -> None:
    assert plan([64] * 5, {64: 1, 512: 2}).replays == (
        (512, (0, 1)),
        (512, (2, 3)),
        (64, (4,)),
    )


def test_nothing_to_pack_makes_no_sub_batch() -> None:
    assert plan([], {64: 1}).replays == ()


@given(
    st.lists(st.integers(1, 3000), max_size=60),
    st.sets(st.integers(1, 2000), min_size=1, max_size=12),
    st.integers(1, 20),
    st.integers(1, 64),
)
@EXAMPLES
def test_every_image_runs_once_and_no_limit_is_broken(
    tokens: list[int], budget_set: set[int], max_images: int, smallest: int
) -> None:
    budgets = sorted(budget_set)
    slots = {budget: min(max_images, budget // smallest + 1) for budget in budgets}
    packed = plan(tokens, slots)
    ran = [index for _, indices in packed.replays for index in indices]
    assert sorted([*ran, *packed.oversize]) == list(range(len(tokens)))
    assert all(tokens[index] > budgets[-1] for index in packed.oversize)
    for budget, indices in packed.replays:
        total = sum(tokens[index] for index in indices)
        assert total <= budget
        assert 0 < len(indices) <= slots[budget]
        smaller = [x for x in budgets if x < budget]
        assert all(total > x or len(indices) > slots[x] for x in smaller)
    sizes = [tokens[index] for index in ran]
    assert sizes == sorted(sizes)


@given(
    st.lists(st.integers(1, 10_000), max_size=40),
    st.integers(1, 6).flatmap(lambda n: st.lists(st.integers(0, 20_000), min_size=n, max_size=n)),
)
@EXAMPLES
def test_loads_are_balanced(sizes: list[int], loads: list[int]) -> None:
    shares = get_load_balance_assignment(sizes, len(loads), loads)
    assert len(shares) == len(loads)
    assert sorted(index for share in shares for index in share) == list(range(len(sizes)))
    totals = [load + sum(sizes[i] for i in share) for load, share in zip(loads, shares, strict=True)]
    for total, share in zip(totals, shares, strict=True):
        assert list(share) == sorted(share)
        if share:  # without its smallest image it would be no fuller than any other
            assert total - min(sizes[i] for i in share) <= min(totals)


def test_a_share_may_be_empty() -> None:
    assert get_load_balance_assignment([10], 3) == ((0,), (), ())
    assert get_load_balance_assignment([10], 2, [5, 0]) == ((), (0,))

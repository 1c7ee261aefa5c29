from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.packing import plan

EXAMPLES = settings(max_examples=300, derandomize=True, deadline=None)


@pytest.mark.parametrize(
    ("tokens", "budget"), [([1], 64), ([64], 64), ([65], 100), ([100], 100), ([1, 1], 100), ([1, 1, 1], 300)]
)
def test_smallest_budget_that_holds_tokens_and_images_is_used(tokens: list[int], budget: int) -> None:
    ((used, _),) = plan(tokens, {64: 1, 100: 2, 300: 4}).replays
    assert used == budget


def test_images_are_packed_smallest_first() -> None:
    packed = plan([300, 64, 100, 64, 500, 1000], {128: 8, 256: 8, 512: 8})
    assert packed.replays == ((256, (1, 3, 2)), (512, (0,)), (512, (4,)))
    assert packed.oversize == (5,)


def test_sub_batch_ends_at_the_limit_on_images() -> None:
    assert plan([64] * 5, {64: 1, 512: 2}).replays == (
        (512, (0, 1)),
        (512, (2, 3)),
        (64, (4,)),
    )


def test_empty_batch_has_no_sub_batches() -> None:
    assert plan([], {64: 1}).replays == ()


@given(
    st.lists(st.integers(1, 3000), max_size=60),
    st.sets(st.integers(1, 2000), min_size=1, max_size=12),
    st.integers(1, 20),
    st.integers(1, 64),
)
@EXAMPLES
def test_every_image_runs_once_and_within_the_limits(
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

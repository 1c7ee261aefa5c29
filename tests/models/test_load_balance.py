from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from models.load_balance import get_load_balance_assignment

EXAMPLES = settings(max_examples=300, derandomize=True, deadline=None)


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
        if share:  # without its smallest image, no other share would be smaller
            assert total - min(sizes[i] for i in share) <= min(totals)


def test_share_may_be_empty() -> None:
    assert get_load_balance_assignment([10], 3) == ((0,), (), ())
    assert get_load_balance_assignment([10], 2, [5, 0]) == ((), (0,))

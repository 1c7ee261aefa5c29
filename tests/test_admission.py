from __future__ import annotations

import pytest

from service.admission import ByteBudget
from service.errors import TooManyRequests


def test_permits_share_the_budget_and_give_it_back() -> None:
    budget = ByteBudget(10)
    with budget.permit(4), budget.permit(6):
        assert budget.held_bytes == 10
        with pytest.raises(TooManyRequests), budget.permit(1):
            raise AssertionError("there is no room")
        with budget.permit(0):
            assert budget.held_bytes == 10
    assert budget.held_bytes == 0


def test_a_refusal_says_when_to_come_again() -> None:
    with pytest.raises(TooManyRequests) as caught, ByteBudget(3).permit(4):
        pass
    assert (caught.value.status, caught.value.code) == (429, "too_many_bytes")
    assert caught.value.headers() == {"Retry-After": "1"}


def test_a_permit_grows_with_what_arrives_and_never_shrinks() -> None:
    budget = ByteBudget(10)
    with budget.permit(3) as permit:
        for covered, held in ((2, 3), (3, 3), (7, 7), (5, 7), (10, 10)):
            permit.cover(covered)
            assert (permit.num_bytes, budget.held_bytes) == (held, held)
        with pytest.raises(TooManyRequests):
            permit.cover(11)
        assert (permit.num_bytes, budget.held_bytes) == (10, 10)
    assert budget.held_bytes == 0


def test_an_error_gives_everything_back() -> None:
    budget = ByteBudget(10)

    def fail() -> None:
        with budget.permit(3) as permit:
            permit.cover(8)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert budget.held_bytes == 0

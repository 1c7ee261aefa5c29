from __future__ import annotations

import pytest

from service.errors import TooManyRequests
from service.intake.byte_budget import ByteBudget


def test_permits_share_the_budget_and_release_it() -> None:
    budget = ByteBudget(10)
    with budget.permit(4) as first, budget.permit(6) as second:
        first.add(4)
        second.add(5)
        second.add(1)
        assert budget.held_bytes == 10
        with pytest.raises(TooManyRequests):
            first.add(1)
        with pytest.raises(TooManyRequests), budget.permit(1):
            raise AssertionError("there is no room")
        with budget.permit(0):
            assert budget.held_bytes == 10
    assert budget.held_bytes == 0


def test_announced_bytes_take_no_room_from_others() -> None:
    budget = ByteBudget(10)
    with budget.permit(10), budget.permit(10) as other:
        other.add(10)
        assert budget.held_bytes == 10


def test_a_refusal_says_when_to_retry() -> None:
    with pytest.raises(TooManyRequests) as caught, ByteBudget(3).permit(4):
        pass
    assert (caught.value.status, caught.value.code) == (429, "too_many_bytes")
    assert caught.value.headers() == {"Retry-After": "1"}


def test_refused_bytes_are_not_held() -> None:
    budget = ByteBudget(10)
    with budget.permit(3) as permit:
        permit.add(8)
        with pytest.raises(TooManyRequests):
            permit.add(3)
        assert (permit.num_bytes, budget.held_bytes) == (8, 8)
        permit.add(2)
    assert budget.held_bytes == 0


def test_error_releases_the_permit() -> None:
    budget = ByteBudget(10)

    def fail() -> None:
        with budget.permit(3) as permit:
            permit.add(8)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert budget.held_bytes == 0

from __future__ import annotations

import pytest

from service.errors import HeadersTooLarge, NotAcceptable
from service.intake.accept import MAX_ACCEPT_CHARS, negotiate


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, "first"),
        ("*/*", "first"),
        ("a/two", "second"),
        ("a/one;q=0.5, a/two", "second"),
        ("a/one, a/two", "first"),
        ("a/*;q=0.2, a/two;q=0.9", "second"),
        ("a/one;q=0, */*", "second"),
    ],
)
def test_highest_weight_wins_and_first_form_among_equals(accept: str | None, expected: str) -> None:
    assert negotiate(accept, {"a/one": "first", "a/two": "second"}) == expected


@pytest.mark.parametrize("accept", ["b/*", "a/one;q=0", "a/one;q=2"])
def test_header_that_allows_no_served_type_is_refused(accept: str) -> None:
    with pytest.raises(NotAcceptable, match="answers a/one, a/two"):
        negotiate(accept, {"a/one": "first", "a/two": "second"})


def test_longest_header_is_read_and_longer_one_refused() -> None:
    longest = "a/one" + "," * (MAX_ACCEPT_CHARS - len("a/one"))
    assert negotiate(longest, {"a/one": "first"}) == "first"
    with pytest.raises(HeadersTooLarge):
        negotiate(longest + ",", {"a/one": "first"})

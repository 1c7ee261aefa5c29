"""Options in the query of a URL."""

from __future__ import annotations

import pytest

from service.errors import ApiError, BadRequest
from service.intake.options import (
    MAX_QUERY_BYTES,
    read_query,
)


def test_query_is_read_with_escapes_and_blanks() -> None:
    assert read_query(b"") == {}
    assert read_query(b"pooling") == {"pooling": ""}
    assert read_query(b"pooling=no%6ee&normalize=&dtype=a+b") == {
        "pooling": "none",
        "normalize": "",
        "dtype": "a b",
    }


@pytest.mark.parametrize(
    ("query", "param"),
    [
        (b"poling=none", "poling"),
        (b"Pooling=none", "Pooling"),
        (b"images=x", "images"),
        (b"pooling=mean&pooling=none", "pooling"),
        (b"%ff=1", "\\ufffd"),
        (b"%ed%a0%80=1", "\\ufffd\\ufffd\\ufffd"),
        (b"x" * 4000 + b"=1", "x" * 64),
    ],
)
def test_unknown_or_repeated_query_parameters_are_refused(query: bytes, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_query(query)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "invalid_option", param)
    assert len(error.message) < 300


@pytest.mark.parametrize(
    "query",
    [b"images=data:image/png;base64,AAAA", b"url=https://example.org/a.jpg", b"images=" + b"A" * 5000],
)
def test_error_for_an_image_in_the_query_points_to_the_body(query: bytes) -> None:
    with pytest.raises(BadRequest, match="images belong in the body"):
        read_query(query)


def test_longest_query_is_read_and_longer_one_refused() -> None:
    longest = b"pooling=none".rjust(MAX_QUERY_BYTES, b"&")
    assert read_query(longest) == {"pooling": "none"}
    with pytest.raises(BadRequest) as caught:
        read_query(b"&" + longest)
    assert (caught.value.code, caught.value.param) == ("invalid_option", None)

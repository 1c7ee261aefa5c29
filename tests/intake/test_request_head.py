from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers

from service.errors import BadRequest, HeadersTooLarge
from service.intake.content_type import MAX_CHARS, ContentType
from service.intake.request_head import RequestHead, parse_head


def head_of(*headers: tuple[str, str], query: bytes = b"") -> RequestHead:
    raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers]
    return parse_head(Headers(raw=raw), query)


def test_missing_headers_say_nothing() -> None:
    assert head_of() == RequestHead()


def test_each_header_is_parsed() -> None:
    head = head_of(
        ("content-type", "Image/PNG; a=b"),
        ("content-length", "0123"),
        ("content-encoding", "GZip"),
        ("accept", "*/*"),
        query=b"pooling=none",
    )
    assert head == RequestHead(ContentType(b"image/png", {b"a": b"b"}), 123, "gzip", "*/*", b"pooling=none")


def test_lines_of_one_accept_header_are_joined() -> None:
    head = head_of(("accept", "text/html"), ("accept", "application/json;q=0.5"))
    assert head.accept == "text/html, application/json;q=0.5"


@pytest.mark.parametrize(
    "length", ["", "x", "-1", "+1", "1.0", "1_0", " 1", "0x10", "\u00b2", "9" * 20, "9" * 5000]
)
def test_a_malformed_content_length_is_refused(length: str) -> None:
    with pytest.raises(BadRequest) as caught:
        head_of(("content-length", length))
    assert caught.value.code == "invalid_body"


def test_the_longest_content_length_is_read() -> None:
    assert head_of(("content-length", "9" * 19)).content_length == 10**19 - 1


def test_a_long_content_type_is_refused() -> None:
    with pytest.raises(HeadersTooLarge):
        head_of(("content-type", "x" * (MAX_CHARS + 1)))


@settings(derandomize=True, max_examples=200, deadline=None)
@given(length=st.text(max_size=5))
def test_any_content_length_is_a_number_or_refused(length: str) -> None:
    with suppress(BadRequest):
        num_bytes = head_of(("content-length", length)).content_length
        assert num_bytes is not None
        assert num_bytes >= 0

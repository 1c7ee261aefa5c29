import json
from typing import Any

import pytest

from service.errors import ApiError, BadRequest, InvalidShape
from service.fetching.image_urls import ImageUrl
from service.intake.options import OPTION_NAMES, resolve_options
from tests.support.bodies import read

JSON = "application/json"


@pytest.mark.parametrize("content_type", [JSON, "application/json; charset=utf-8", "Application/JSON ;x"])
def test_images_and_options_are_read(content_type: str) -> None:
    document = {
        "pooling": "none",
        "images": ["AAAA", {"data": "AQ=="}, {"url": "data:image/png;base64,Ag"}],
        "deepstack": True,
    }
    body = read(content_type, json.dumps(document).encode())
    assert body.images == (b"\0\0\0", b"\1", b"\2")
    assert body.options == {"pooling": "none", "deepstack": True}


@pytest.mark.parametrize("item", ["AAAA", {"data": "AAAA"}, {"url": "data:,%00%00%00"}, "data:,%00%00%00"])
def test_single_image_needs_no_list(item: Any) -> None:
    assert read(JSON, json.dumps({"images": item}).encode()).images == (b"\0\0\0",)


@pytest.mark.parametrize(
    ("value", "expected"), [(True, True), (1, True), ("True", True), (False, False), (0, False)]
)
def test_boolean_option_may_be_a_number(value: Any, expected: bool) -> None:
    body = read(JSON, json.dumps({"images": "AAAA", "normalize": value}).encode())
    assert resolve_options(body.options, None).normalize is expected


@pytest.mark.parametrize("number", ["2", "-1", "1.0", "1e0", "1" + "0" * 5000])
def test_other_numbers_are_refused_as_values(number: str) -> None:
    body = read(JSON, b'{"images": "AAAA", "normalize": %s}' % number.encode())
    with pytest.raises(BadRequest, match="normalize must be true or false") as caught:
        resolve_options(body.options, None)
    assert (caught.value.code, caught.value.param) == ("invalid_option", "normalize")


def test_option_that_is_null_counts_as_missing() -> None:
    document: dict[str, Any] = {"images": "AAAA", **dict.fromkeys(OPTION_NAMES)}
    assert read(JSON, json.dumps(document).encode()).options == {}


@pytest.mark.parametrize("item", [{"data": "AAAA", "url": None}, {"data": None, "url": "data:;base64,AAAA"}])
def test_member_of_an_image_that_is_null_counts_as_missing(item: Any) -> None:
    assert read(JSON, json.dumps({"images": [item]}).encode()).images == (b"\0\0\0",)


def test_urls_keep_their_place_among_the_images() -> None:
    images = ["http://a.test/", "AAAA", {"url": "https://b.test/?c"}]
    body = read(JSON, json.dumps({"images": images}).encode())
    assert body.images == (ImageUrl("http://a.test/"), b"\0\0\0", ImageUrl("https://b.test/?c"))


def test_byte_order_mark_is_ignored() -> None:
    assert read(JSON, b'\xef\xbb\xbf{"images": "AAAA"}').images == (b"\0\0\0",)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"{", id="cut"),
        pytest.param(b" ", id="blank"),
        pytest.param(b'{"images": "AAAA"} x', id="more behind"),
        pytest.param(b'{"images": "A\nAAA"}', id="raw line break in a string"),
        pytest.param(b"{'images': 'AAAA'}", id="single quotes"),
        pytest.param(b'{"images": NaN}', id="NaN"),
        pytest.param(b'{"images": [-Infinity]}', id="-Infinity"),
        pytest.param(b'{"images": "\xff"}', id="not UTF-8"),
        pytest.param('{"images": "AAAA"}'.encode("utf-16"), id="UTF-16"),
        pytest.param(b"[" * 50_000, id="deep lists"),
        pytest.param(b'{"a":' * 30_000, id="deep objects"),
        pytest.param(b'{"images": [' + b"0," * 99_999 + b"0]}", id="many values"),
        pytest.param(b'{"images": "AAAA", "images": "AAAA"}', id="images twice"),
        pytest.param(b'{"images": "AAAA", "dtype": "float32", "dtype": "float32"}', id="option twice"),
    ],
)
def test_malformed_json_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        read(JSON, body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_error_for_malformed_json_gives_line_and_column() -> None:
    with pytest.raises(BadRequest, match="line 2, column 3"):
        read(JSON, b'{"images":\n  x}')


@pytest.mark.parametrize(
    ("document", "param"),
    [
        ([], None),
        ("AAAA", None),
        (None, None),
        (5, None),
        ({}, "images"),
        ({"image": "AAAA"}, "image"),
        ({"images": "AAAA", "model": "x"}, "model"),
        ({"images": "AAAA", "\ud800\n" + "x" * 100: 1}, "\\ud800\\n" + "x" * 62),
        ({"images": None}, "images"),
        ({"images": [None]}, "images[0]"),
        ({"images": "AAAA", "model": None}, "model"),
        ({"images": 5}, "images[0]"),
        ({"images": ["AAAA", 5]}, "images[1]"),
        ({"images": ["AAAA", 1.5e300]}, "images[1]"),
        ({"images": ["AAAA", "AAAA", ["AAAA"]]}, "images[2]"),
        ({"images": [True]}, "images[0]"),
        ({"images": [{}]}, "images[0]"),
        ({"images": [{"data": 5}]}, "images[0]"),
        ({"images": [{"data": None}]}, "images[0]"),
        ({"images": [{"url": {"url": "x"}}]}, "images[0]"),
        ({"images": [{"data": "AAAA", "url": "data:,x"}]}, "images[0]"),
        ({"images": [{"data": "AAAA", "detail": "low"}]}, "images[0]"),
        ({"images": "AAAA", "normalize": [1]}, "normalize"),
        ({"images": "AAAA", "deepstack": {}}, "deepstack"),
        ({"images": "AAAA", "pooling": 1}, "pooling"),
        ({"images": "AAAA", "dtype": 32}, "dtype"),
        ({"images": "AAAA", "dtype": ["float32"]}, "dtype"),
    ],
)
def test_error_for_json_of_the_wrong_shape_names_the_member(document: Any, param: str | None) -> None:
    with pytest.raises(InvalidShape) as caught:
        read(JSON, json.dumps(document).encode())
    assert (caught.value.status, caught.value.param) == (422, param)
    caught.value.message.encode()


def test_error_for_an_unknown_member_lists_the_known_ones() -> None:
    with pytest.raises(InvalidShape, match="unknown member input; the members are images and pooling, "):
        read(JSON, json.dumps({"input": "AAAA"}).encode())


def test_unknown_member_of_an_item_is_named() -> None:
    with pytest.raises(InvalidShape, match="detail"):
        read(JSON, json.dumps({"images": [{"data": "AAAA", "detail": "low"}]}).encode())


@pytest.mark.parametrize(
    ("images", "status", "code", "param"),
    [
        ([], 400, "empty_input", "images"),
        ([""], 400, "empty_input", "images[0]"),
        (["AAAA", {"url": "data:,"}], 400, "empty_input", "images[1]"),
        (["AAAA"] * 4, 413, "too_many_images", "images"),
        (["AAAA", "A" * 1336], 413, "image_too_large", "images[1]"),
        (["AAAA", "AAAA", "A"], 400, "invalid_base64", "images[2]"),
        (["AAAA", {"data": "data:,x"}], 400, "invalid_base64", "images[1]"),
        (["AAAA", "ftp://example.org/a.jpg"], 400, "url_not_allowed", "images[1]"),
        ({"url": "file:///a.jpg"}, 400, "url_not_allowed", "images[0]"),
        (["AAAA", {"data": "https://example.org/a.jpg"}], 400, "invalid_base64", "images[1]"),
    ],
)
def test_error_for_a_bad_image_gives_its_index(images: Any, status: int, code: str, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(JSON, json.dumps({"images": images}).encode())
    assert (caught.value.status, caught.value.code, caught.value.param) == (status, code, param)


def test_commas_within_a_data_uri_may_be_many() -> None:
    assert read(JSON, json.dumps({"images": "data:," + "," * 900}).encode()).images == (b"," * 900,)

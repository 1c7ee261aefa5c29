import base64
import random
from urllib.parse import quote_from_bytes, unquote_to_bytes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import ApiError, BadRequest, TooLarge
from service.fetching.image_urls import ImageUrl
from service.intake.inline_images import decode_base64, decode_item, decode_url

MAX = 10_000_000
# Longer than the slices in which text is decoded; its base64 has every character of the alphabet.
LARGE = random.Random(7).randbytes(700_001)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(data=st.binary(max_size=50), urlsafe=st.booleans(), padded=st.booleans())
def test_either_alphabet_decodes_with_and_without_padding(data: bytes, urlsafe: bool, padded: bool) -> None:
    encoded = (base64.urlsafe_b64encode(data) if urlsafe else base64.b64encode(data)).decode()
    assert decode_item(encoded if padded else encoded.rstrip("="), MAX) == data


@pytest.mark.parametrize("num_bytes", [len(LARGE), len(LARGE) - 1, len(LARGE) - 2, 3 * 2**16, 3 * 2**16 + 1])
def test_large_base64_decodes(num_bytes: int) -> None:
    data = LARGE[:num_bytes]
    assert decode_base64(base64.b64encode(data).decode(), MAX) == data
    assert decode_base64(base64.urlsafe_b64encode(data).decode().rstrip("="), MAX) == data


@pytest.mark.parametrize(
    "text", ["QUJD\nREVG\n", "QUJD\r\nREVG", " QUJDREVG ", "QUJDR\tEVG", "Q U J D R E V G"]
)
def test_whitespace_in_base64_is_ignored(text: str) -> None:
    assert decode_item(text, MAX) == b"ABCDEF"


BROKEN = {
    "one digit": ("A", "length"),
    "one digit over": ("AAAAA", "length"),
    "half the padding": ("AA=", "padding"),
    "too much padding": ("AAA==", "padding"),
    "padding without need": ("AAAA=", "padding"),
    "a group of padding": ("AAAA====", "padding"),
    "padding alone": ("=", "padding"),
    "padding inside": ("AA==AAAA", "padding"),
    "padding at the end of a slice": ("A" * (2**18 - 2) + "==AAAA", "padding"),
    "both alphabets": ("A+A_", "mixes"),
    "both alphabets again": ("A-/A", "mixes"),
    "outside the alphabet": ("AA!A", "alphabet"),
    "a group outside the alphabet": ("AAAA****AAAA", "alphabet"),
    "NUL": ("AAA\0", "alphabet"),
    "outside ASCII": ("AAA\u00e9", "ASCII"),
    "lone surrogate": ("AAA\ud800", "ASCII"),
    "a space that is not ASCII": ("AAA\u00a0A", "ASCII"),
    "bad digit in a later slice": ("AAAA" * 2**17 + "A*AA", "alphabet"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_malformed_base64_is_refused_with_the_reason(name: str) -> None:
    text, problem = BROKEN[name]
    with pytest.raises(BadRequest, match=problem) as caught:
        decode_item(text, MAX)
    assert (caught.value.status, caught.value.code) == (400, "invalid_base64")
    assert text[:20] not in caught.value.message or len(text) < 3


@pytest.mark.parametrize(
    "uri",
    [
        "data:image/png;base64,QUJD",
        "DATA:IMAGE/PNG;BASE64,QUJD",
        "data:;base64,QUJD",
        "data:image/png;charset=utf-8;name=a.png;base64,QUJD",
        "data:image/png; base64 ,QUJD",
        "data:image/png;base64,QUJ%44",
        "data:image/png;base64,%51%55%4a%44",
        "data:image/png;x=%22a%2Cb%22;base64,QUJD",
        "DaTa:Image/PNG;Name=A;BaSe64,QUJD",
        "data:base64,ABC",
        "data:image/png;base64,QU\nJD",
        "data:,ABC",
        " \r\n\tdata:image/png;base64,QUJD",
        "data:image/png;base64,QUJD \r\n",
        "\u00a0data:,ABC\n",
        "data:,%41\r\n\tB%\n43",
        "data:image/png,%41B%43",
        "data:text/plain;charset=utf-8,A%42C",
    ],
)
def test_data_uris_decode(uri: str) -> None:
    assert decode_item(uri, MAX) == b"ABC"
    assert decode_url(uri, MAX) == b"ABC"


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.text("%4aFg\x00", max_size=12))
def test_percent_decoding_agrees_with_urllib(text: str) -> None:
    assert decode_url("data:," + text, MAX) == unquote_to_bytes(text)


def test_characters_of_base64_may_be_percent_encoded() -> None:
    assert decode_url("data:;base64,%2B%2F%2b%2fQQ%3D%3D", MAX) == b"\xfb\xff\xbf\x41"


@pytest.mark.parametrize("shift", range(4))
def test_large_percent_encoding_decodes(shift: int) -> None:
    data = b"x" * shift + LARGE
    assert decode_url("data:image/png," + quote_from_bytes(data), MAX) == data
    assert decode_url("data:," + "x" * shift + "%41" * 200_000, MAX) == b"x" * shift + b"A" * 200_000


@pytest.mark.parametrize(
    "uri", ["data:image/png;base64", "data:", "data:,\u00e9", "data:,\ud800", "data:;base64,A"]
)
def test_malformed_data_uris_are_refused(uri: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode_item(uri, MAX)
    assert caught.value.code == "invalid_base64"


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("ftp://example.org/a.jpg", "^ftp: URLs are not served"),
        ("FILE:///etc/hostname", "^file: URLs are not served"),
        ("javascript:x", "^javascript: URLs are not served"),
    ],
)
def test_urls_of_other_schemes_are_refused(url: str, hint: str) -> None:
    for decode in (decode_item, decode_url):
        with pytest.raises(BadRequest, match=hint) as caught:
            decode(url, MAX)
        assert caught.value.code == "url_not_allowed"


@pytest.mark.parametrize("url", ["http://example.org/a.jpg", "HTTPS://example.org/a.jpg", "http:", "https:x"])
@pytest.mark.parametrize(
    ("before", "after"), [("", ""), (" ", ""), ("", "\n"), ("\r\n\t", " \v\f"), ("\u00a0", "\u2003")]
)
def test_white_space_around_a_url_is_trimmed(url: str, before: str, after: str) -> None:
    text = before + url + after
    assert decode_item(text, MAX) == decode_url(text, MAX) == ImageUrl(url)


def test_error_for_base64_in_place_of_a_url_says_where_it_belongs() -> None:
    with pytest.raises(BadRequest, match=r'not a URL; .* base64 .* as \{"data": "…"\}') as caught:
        decode_url("AAAA", MAX)
    assert caught.value.code == "url_not_allowed"


@pytest.mark.parametrize("url", ["data:image/png;base64,QUJD", " DATA:,A", "https://example.org/a.jpg"])
def test_error_for_a_url_in_place_of_base64_says_where_it_belongs(url: str) -> None:
    with pytest.raises(BadRequest, match=r'^this is a URL \((data|https):\), .* as \{"url": "…"\}') as caught:
        decode_base64(url, MAX)
    assert caught.value.code == "invalid_base64"


@pytest.mark.parametrize(
    "over",
    [
        "QUJDRA==",
        "QUJDRA",
        "QU JD\nRA",
        "data:;base64,QUJDRA",
        "data:,ABCD",
        "data:,%41%42%43%44",
        "data:,%%%%",  # no escapes, so that all 4 bytes stay
        "data:,%41%%B",
        "QUJDRA" + "*" * 10,  # the size is checked before anything is decoded
    ],
)
def test_image_over_its_limit_is_refused_with_both_numbers(over: str) -> None:
    with pytest.raises(TooLarge) as caught:
        decode_item(over, 3)
    error: ApiError = caught.value
    assert (error.status, error.code) == (413, "image_too_large")
    assert " 3 " in error.message


@pytest.mark.parametrize("within", ["QUJD", "Q U J D", "data:;base64,QUJD", "data:,%41%42%43", "data:,ABC"])
def test_image_at_its_limit_is_decoded(within: str) -> None:
    assert decode_item(within, 3) == b"ABC"

"""Decodes images that are written as text: base64 and `data:` URIs. Other URLs stay as they are.

Knows nothing of JSON. Errors are raised without `param`, because only the caller knows the image's index.
"""

from __future__ import annotations

import binascii
import re

import numpy as np
import numpy.typing as npt
import pybase64

from service.errors import BadRequest, TooLarge
from service.fetching.image_urls import ImageUrl

# Neither alphabet of base64 has a colon, so text that begins like this is meant as a URL.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,31}):")
_WHITESPACE = b" \t\r\n\f\v"
_URLSAFE = b"-_"
_IGNORED_IN_URLS = b"\t\r\n"  # anywhere in a URL. Source: WHATWG URL Standard, section 4.4
_URLSAFE_TO_STANDARD = bytes.maketrans(_URLSAFE, b"+/")
# Decoding percent signs holds the interpreter lock, and other threads get it between two slices.
_SLICE_CHARS = 2**18
_NO_DIGIT = 16


def _digit_values() -> npt.NDArray[np.uint8]:
    """The value of each character as a hexadecimal digit, `_NO_DIGIT` for other characters: uint8 [256]."""
    values = np.full(256, _NO_DIGIT, np.uint8)
    for digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
        values[[*digits]] = np.arange(16)
    return values


_DIGIT_VALUES = _digit_values()


def decode_item(text: str, max_bytes: int) -> bytes | ImageUrl:
    """The bytes of an image given as a `data:` URI or as base64, or its URL. Trims white space.

    Raises `BadRequest`, and `TooLarge` for more than `max_bytes` bytes.
    """
    text = text.strip()
    return decode_url(text, max_bytes) if _SCHEME.match(text) else _decode_base64(_ascii(text), max_bytes)


def decode_url(url: str, max_bytes: int) -> bytes | ImageUrl:
    """As `decode_item`, but refuses base64 that is not in a `data:` URI."""
    url = url.strip()
    match = _SCHEME.match(url)
    scheme = match[1].lower() if match else ""
    if scheme == "data":
        return _decode_data_uri(url, max_bytes)
    if scheme in ("http", "https"):
        return ImageUrl(url)
    problem = f"{scheme}: URLs are not served" if scheme else "this is not a URL"
    raise BadRequest(
        f"{problem}; an image URL begins with http:, https: or data:, and base64 without data: is sent as a "
        'string or as {"data": "…"}',
        code="url_not_allowed",
    )


def decode_base64(text: str, max_bytes: int) -> bytes:
    """Decodes base64 of the standard or the URL-safe alphabet. Padding is optional, white space is ignored.

    Raises `BadRequest` for a URL, for malformed base64 and for a mix of both alphabets. Raises `TooLarge`
    before decoding if the image has more than `max_bytes` bytes.
    """
    text = text.strip()
    match = _SCHEME.match(text)
    if match:
        raise BadRequest(
            f'this is a URL ({match[1].lower()}:), not base64; send it as a string or as {{"url": "…"}}',
            code="invalid_base64",
        )
    return _decode_base64(_ascii(text), max_bytes)


def _decode_data_uri(uri: str, max_bytes: int) -> bytes:
    """Source: RFC 2397. The media type is a hint; the image's content decides."""
    header, comma, data = uri.partition(",")
    if not comma:
        raise BadRequest("the data: URI has no comma before its data", code="invalid_base64")
    is_base64 = header.rpartition(";")[2].strip().lower() == "base64"
    payload = _ascii(data)
    if not is_base64:
        payload = payload.translate(None, _IGNORED_IN_URLS)
        _check_size(len(payload) - 2 * payload.count(b"%"), max_bytes)  # as if each "%" began an escape
        image = _percent_decode(payload)
        _check_size(len(image), max_bytes)
        return image
    return _decode_base64(_percent_decode(payload) if b"%" in payload else payload, max_bytes)


def _ascii(text: str) -> bytes:
    try:
        return text.encode("ascii")
    except UnicodeEncodeError:
        raise BadRequest("the image's text has characters outside ASCII", code="invalid_base64") from None


def _decode_base64(encoded: bytes, max_bytes: int) -> bytes:
    is_urlsafe = _has_any(encoded, _URLSAFE)
    if is_urlsafe and _has_any(encoded, b"+/"):
        raise BadRequest("the base64 mixes the standard and the URL-safe alphabet", code="invalid_base64")
    padded = encoded
    if is_urlsafe or _has_any(encoded, _WHITESPACE):
        padded = encoded.translate(_URLSAFE_TO_STANDARD, _WHITESPACE)
    digits = padded.rstrip(b"=")
    num_missing = -len(digits) % 4
    if num_missing == 3 or len(padded) - len(digits) not in (0, num_missing) or b"=" in digits:
        raise BadRequest("the base64 has a wrong length or padding", code="invalid_base64")
    _check_size(len(digits) * 3 // 4, max_bytes)
    try:
        return pybase64.b64decode(digits + b"=" * num_missing, validate=True)
    except binascii.Error:
        raise BadRequest("the base64 has characters outside its alphabet", code="invalid_base64") from None


def _has_any(data: bytes, chars: bytes) -> bool:
    """Much faster than a translation or a regular expression."""
    return any(char in data for char in chars)


def _percent_decode(data: bytes) -> bytes:
    """Decodes slice by slice. A percent sign that begins no escape stays as it is."""
    pieces: list[bytes] = []
    start = 0
    while start < len(data):
        end = start + _SLICE_CHARS
        escape = data.find(b"%", end - 2, end)  # an escape that the slice would cut
        if escape != -1:
            end = escape
        pieces.append(_percent_decode_slice(data[start:end]))
        start = end
    return b"".join(pieces)


def _percent_decode_slice(data: bytes) -> bytes:
    """Uses arrays: `urllib.parse` makes an object of every escape, which takes seconds for a large image."""
    chars = np.frombuffer(data, np.uint8)
    places = np.flatnonzero(chars[:-2] == ord("%"))
    high, low = _DIGIT_VALUES[chars[places + 1]], _DIGIT_VALUES[chars[places + 2]]
    is_escape = (high < _NO_DIGIT) & (low < _NO_DIGIT)
    places = places[is_escape]
    decoded = chars.copy()
    decoded[places] = (high * 16 + low)[is_escape]
    is_kept = np.ones(len(chars), np.bool_)
    is_kept[places + 1] = is_kept[places + 2] = False
    return decoded[is_kept].tobytes()


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise TooLarge(f"the image has {num_bytes} bytes; {max_bytes} are allowed", code="image_too_large")

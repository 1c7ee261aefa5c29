"""Kinds of JPEG that are not served, and files that lack their end marker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from service.errors import ApiError
from service.images.image_file import ImageLimits, read_header
from tests.support.image_files import save, tiff
from tests.support.jpeg_files import ARITHMETIC, JPEG_LS, LOSSLESS_8_BITS, LOSSLESS_16_BITS, TWELVE_BITS
from tests.support.measuring import measure

LIMITS = ImageLimits(max_image_bytes=1 << 20, max_image_pixels=1 << 20)
END = b"\xff\xd9"
TRUNCATED = (400, "the JPEG data is broken or truncated")


def picture() -> Image.Image:
    rgb = np.random.default_rng(1).integers(0, 255, (9, 12, 3), np.uint8)
    return Image.fromarray(rgb).resize((200, 150), Image.Resampling.BICUBIC)


def with_exif_thumbnail(data: bytes) -> bytes:
    """The file with a whole JPEG, end marker and all, in its EXIF data."""
    body = b"Exif\0\0MM\0*\0\0\0\x08\0\0" + save(Image.new("L", (8, 8)), "JPEG")
    return data[:2] + b"\xff\xe1" + (len(body) + 2).to_bytes(2, "big") + body + data[2:]


def separate_scans() -> bytes:
    """A baseline JPEG with one scan for each component."""
    planes = [save(plane, "JPEG", quality=90) for plane in picture().convert("YCbCr").split()]
    first = planes[0]
    frame = first.index(b"\xff\xc0")
    size = first[frame + 5 : frame + 9]
    components = b"".join(bytes((index, 0x11, 0)) for index in (1, 2, 3))
    scans = b""
    for index, plane in enumerate(planes, 1):
        at = plane.index(b"\xff\xda")
        tables = plane[plane.index(b"\xff\xc4") : at]
        scans += tables + plane[at : at + 5] + bytes((index,)) + plane[at + 6 : -2]
    return first[:frame] + b"\xff\xc0\0\x11\x08" + size + b"\3" + components + scans + END


FILES: dict[str, bytes] = {
    "baseline": save(picture(), "JPEG", quality=90),
    "thumbnail": with_exif_thumbnail(save(picture(), "JPEG", quality=90)),
    "restarts": save(picture(), "JPEG", quality=90, restart_marker_blocks=1),
    "gray": save(picture().convert("L"), "JPEG"),
    "separate scans": separate_scans(),
    "progressive": save(picture(), "JPEG", quality=90, progressive=True),
    "progressive gray": save(picture().convert("L"), "JPEG", progressive=True),
    "CMYK": save(picture().convert("CMYK"), "JPEG"),
    "CMYK, progressive": save(picture().convert("CMYK"), "JPEG", progressive=True),
}


def decoded(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return read_header(data, LIMITS).decode()


def refusal(data: bytes) -> tuple[int, str]:
    with pytest.raises(ApiError) as caught:
        decoded(data)
    return caught.value.status, caught.value.message


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (TWELVE_BITS, "JPEG of 12 bits"),
        (LOSSLESS_16_BITS, "lossless JPEG of 16 bits"),
        (JPEG_LS, "JPEG-LS"),
        (FILES["baseline"].replace(b"\xff\xc0", b"\xff\xc5", 1), "hierarchical JPEG"),
        (
            FILES["baseline"].replace(b"\xff\xc0", b"\xff\xde\0\x0b\x08\0\1\0\1\1\1\x11\0\xff\xc0", 1),
            "hierarchical JPEG",
        ),
        (LOSSLESS_8_BITS.replace(b"\xff\xc3", b"\xff\xcb"), "lossless JPEG of 8 bits"),
    ],
)
def test_kinds_that_are_not_decoded_are_named(data: bytes, name: str) -> None:
    status, message = refusal(data)
    assert status == 415
    assert message.startswith(f"the data is {name}, which is not served")


def test_kinds_that_are_not_decoded_are_named_in_tiff() -> None:
    data = tiff(8, 8, TWELVE_BITS, {258: (12,), 259: (7,), 262: (1,), 277: (1,), 278: (8,)})
    assert refusal(data)[1].startswith("the data is TIFF with JPEG of 12 bits")


def test_lossless_jpeg_of_8_bits_is_exact() -> None:
    y, x = np.mgrid[:8, :8]
    assert np.array_equal(decoded(LOSSLESS_8_BITS), np.dstack([x * 8 + y * 2] * 3))


def test_arithmetic_coding_is_decoded() -> None:
    y, x = np.mgrid[:16, :24]
    expected = np.stack([(x * 8 + y * 2 + 40 * channel) % 256 for channel in range(3)], 2)
    assert np.abs(decoded(ARITHMETIC) - expected).mean() < 6


@pytest.mark.parametrize("name", FILES)
def test_missing_end_marker_does_not_matter(name: str) -> None:
    data = FILES[name]
    for without_end in (data[:-2], data[:-1]):
        assert np.array_equal(decoded(without_end), decoded(data))


@pytest.mark.parametrize("name", FILES)
def test_missing_pixels_are_refused(name: str) -> None:
    data = FILES[name]
    for size in (*range(len(data) - 40, len(data) - 2), *range(100, len(data) - 2, 1 + len(data) // 99)):
        assert refusal(data[:size]) == TRUNCATED


@pytest.mark.parametrize("name", [name for name, data in FILES.items() if data.count(b"\xff\xda") > 1])
def test_missing_scans_are_refused(name: str) -> None:
    data = FILES[name]
    at = data.rindex(b"\xff\xda")
    while at > 0:
        assert refusal(data[:at]) == TRUNCATED
        at = data.rfind(b"\xff\xda", 0, at) if data.count(b"\xff\xda", 0, at) > 1 else 0


@pytest.mark.parametrize("name", FILES)
def test_garbage_behind_the_end_marker_is_ignored(name: str) -> None:
    data = FILES[name]
    for garbage in (b"\0" * 1000, b"\xff\xd8" + data[2:], b"garbage" * 50):
        assert np.array_equal(decoded(data + garbage), decoded(data))


def test_garbage_in_place_of_the_end_marker_is_ignored() -> None:
    data = FILES["baseline"]
    assert np.array_equal(decoded(data[:-2] + b"garbage" * 50), decoded(data))


def test_arithmetic_coding_without_an_end_marker_is_refused() -> None:
    """Decoders cannot tell whether pixels are missing."""
    assert refusal(ARITHMETIC[:-2]) == TRUNCATED


def test_very_many_segments_without_an_end_marker_are_quick() -> None:
    data = FILES["baseline"][:-2] + b"\xff\xfe\0\2" * 250_000
    assert measure(lambda: decoded(data), max_seconds=1).seconds < 1

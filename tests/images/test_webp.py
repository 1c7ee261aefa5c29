"""The memory reserved for the tables of lossless WebP: bounded, and small for the files of an encoder."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from service.images.image_file import ImageLimits, read_header
from service.images.webp import tables_bytes, webp_chunks
from tests.support.image_files import save
from tests.support.webp_files import chunk, frame, riff, vp8x

ORIENTATION = 0x0112
LIMITS = ImageLimits(2**24, 2**26)


def lossless(num_bytes: int) -> bytes:
    return chunk(b"VP8L", bytes(num_bytes))


@pytest.mark.parametrize(
    ("num_bytes", "side", "expected"),
    [
        (0, 1024, 0),
        (100, 1024, 227_500),  # 40 groups of the shortest codes
        (10**6, 4, 20_584_000),  # groups that no pixel refers to
        (10**6, 512, 16_384 * 20_584),
        (10**6, 509, 16_384 * 20_584),  # a part of 4 × 4 pixels counts as all of it
        (10**6, 1024, 65_536 * 20_584),
        (10**6, 4096, 65_536 * 20_584),
    ],
)
def test_tables_are_bounded_by_data_pixels_and_format(num_bytes: int, side: int, expected: int) -> None:
    assert tables_bytes(riff(lossless(num_bytes)), side, side) == expected


@pytest.mark.parametrize(
    ("data", "num_bytes"),
    [
        (riff(chunk(b"VP8 ", bytes(1000)), lossless(500)), 0),  # the second chunk is not part of the image
        (riff(vp8x(0, 900, 900), chunk(b"VP8 ", bytes(1000))), 0),
        (riff(vp8x(0, 900, 900), chunk(b"ICCP", bytes(9)), lossless(500)), 500),
        (riff(vp8x(16, 900, 900), chunk(b"ALPH", bytes(501)), chunk(b"VP8 ", bytes(1000))), 501),
        (riff(vp8x(2, 900, 900), frame(900, 900, chunk(b"VP8 ", bytes(9))), lossless(5)), 5),
        (riff(vp8x(2, 900, 900), frame(9, 9, lossless(30)), frame(9, 9, lossless(70))), 70),
        (riff(vp8x(0, 900, 900), lossless(500))[:-100], 400),  # truncated
    ],
)
def test_tables_are_those_of_the_largest_lossless_data(data: bytes, num_bytes: int) -> None:
    assert tables_bytes(data, 900, 900) == num_bytes * 2275


def test_file_of_too_many_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match="too many"):
        list(webp_chunks(riff(vp8x(0, 9, 9), bytes(8) * 70_000)))


def test_lossy_webp_needs_no_memory_for_tables() -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    for options in ({}, {"exif": exif}):
        data = save(Image.new("RGB", (640, 480), "red"), "WEBP", **options)
        assert read_header(data, LIMITS).decoding_bytes == 17 * 640 * 480 + len(data)


def test_lossless_webp_of_an_encoder_is_exact_and_its_memory_is_bounded_by_its_data() -> None:
    rgb = np.random.default_rng(7).integers(0, 256, (60, 80, 3), np.uint8)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    header = read_header(save(Image.fromarray(rgb), "WEBP", lossless=True, exif=exif), LIMITS)
    assert (header.width, header.height) == (60, 80)
    assert np.array_equal(header.decode(), np.rot90(rgb, -1))
    small = save(Image.new("RGB", (2000, 2000), "red"), "WEBP", lossless=True)
    assert read_header(small, LIMITS).decoding_bytes < 17 * 2000 * 2000 + 2300 * len(small)

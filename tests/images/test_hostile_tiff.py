"""Hostile TIFF files, and JPEGs inside them."""

from __future__ import annotations

import struct
import zlib

import pytest
from PIL import Image

from service.errors import BadRequest
from service.images.image_file import read_header
from tests.support.hostile import LIMITS, outcome
from tests.support.image_files import save, small_tiff, tiff

AT = struct.pack("<I", 264)


LARGE = (19 << 20) // 8 * 8


@pytest.mark.parametrize("tag", [282, 306, 700, 34377, 34675, 34665, 34853, 50838])
def test_tiff_tags_that_pixels_do_not_depend_on_may_have_any_size(tag: int) -> None:
    rationals = small_tiff({tag: (5, LARGE // 8, AT)}, bytes(LARGE))
    assert outcome(rationals) == (200, "")
    directory = struct.pack("<HHHI4s", 1, 42_000, 5, (LARGE - 64) // 8, struct.pack("<I", 300)) + bytes(4)
    assert outcome(small_tiff({tag: (4, 1, AT)}, directory.ljust(LARGE, b"\0"))) == (200, "")


@pytest.mark.parametrize("tag", [256, 258, 273, 279, 320, 338, 339])
def test_tiff_tags_of_absurd_sizes_are_refused(tag: int) -> None:
    assert outcome(small_tiff({tag: (3, LARGE // 2, AT)}, bytes(LARGE))) == (400, "invalid_image")
    assert outcome(small_tiff({tag: (4, 0xFFFFFFFF, AT)})) == (400, "invalid_image")
    assert outcome(small_tiff({tag: (4, 2, b"\xff\xff\xff\xff")})) == (400, "invalid_image")


def test_tiff_with_a_huge_tile_around_a_small_image_is_refused() -> None:
    side = struct.pack("<I", 40_000)
    inflated = zlib.compress(bytes(64 << 20), 9)
    tags = {259: (3, 1, b"\x08\0\0\0"), 322: (4, 1, side), 323: (4, 1, side)}
    tiles = {324: (4, 1, AT), 325: (4, 1, struct.pack("<I", len(inflated)))}
    assert outcome(small_tiff({**tags, **tiles}, inflated)) == (413, "too_many_pixels")


def test_tiff_with_fewer_pixels_than_its_tags_state_is_refused() -> None:
    side = (4, 1, struct.pack("<I", 8000))
    assert outcome(small_tiff({256: side, 257: side})) == (400, "invalid_image")
    huge = (4, 1, b"\xff\xff\xff\xff")
    assert outcome(small_tiff({256: huge, 257: huge})) == (413, "too_many_pixels")
    assert outcome(small_tiff({256: huge, 257: huge, 259: (3, 1, b"\x08\0\0\0")})) == (413, "too_many_pixels")


def test_tiff_directory_at_odd_offsets_is_decoded_or_refused() -> None:
    data = small_tiff({})
    for offset in (0, 4, 8, len(data) - 1, len(data), 0xFFFFFFFF):
        outcome(data[:4] + struct.pack("<I", offset) + data[8:])
    assert outcome(data[:-4] + data[4:8]) == (200, "")


def jpeg_tiff(width: int, height: int, jpeg: bytes, tags: dict[int, tuple[int, ...]]) -> bytes:
    """A TIFF of CMYK, in one strip unless the tags say otherwise."""
    return tiff(width, height, jpeg, {258: (8,) * 4, 259: (7,), 262: (5,), 277: (4,), **tags})


def cmyk_jpeg(width: int, height: int) -> bytes:
    return save(Image.new("CMYK", (width, height), (9, 99, 0, 0)), "JPEG", progressive=True, subsampling=0)


@pytest.mark.parametrize(
    ("size", "tags"),
    [
        ((64, 64), {}),
        ((4096, 64), {}),
        ((4096, 64), {278: (4096,)}),
        ((64, 4096), {}),
        ((4096, 64), {322: (4096,), 323: (64,)}),
        ((4096, 64), {322: (4096,)}),
    ],
)
def test_jpeg_in_tiff_larger_than_its_strip_or_tile_is_refused(
    size: tuple[int, int], tags: dict[int, tuple[int, ...]]
) -> None:
    data = jpeg_tiff(*size, cmyk_jpeg(4096, 4096), tags)
    assert outcome(data) == (400, "invalid_image")
    refused_unread(data)


def refused_unread(data: bytes) -> None:
    with pytest.raises(BadRequest):
        read_header(data, LIMITS)


def test_last_strip_of_jpegs_in_tiff_may_be_as_tall_as_the_others() -> None:
    jpeg = cmyk_jpeg(64, 32)
    strips = {273: (8, 8 + len(jpeg)), 279: (len(jpeg), len(jpeg)), 278: (32,)}
    assert outcome(jpeg_tiff(64, 40, jpeg * 2, strips)) == (200, "")
    shared = {**strips, 273: (8, 8)}
    assert outcome(jpeg_tiff(64, 40, jpeg, shared)) == (200, "")


def test_jpeg_in_tiff_is_served_up_to_a_number_of_scans() -> None:
    data = save(Image.new("L", (6000, 6000)), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    missing = 16 - data.count(b"\xff\xda")
    for num_more, expected in ((missing, (200, "")), (missing + 1, (400, "invalid_image"))):
        jpeg = data[:-2] + scan * num_more + data[-2:]
        assert outcome(tiff(6000, 6000, jpeg, {258: (8,), 259: (7,), 262: (1,)})) == expected


def test_jpeg_in_tiff_with_fewer_pixels_than_its_header_states_is_refused() -> None:
    jpeg = save(Image.new("L", (64, 64)), "JPEG")
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg = jpeg[:at] + struct.pack(">HH", 8000, 8000) + jpeg[at + 4 :]
    assert outcome(tiff(8000, 8000, jpeg, {258: (8,), 259: (7,), 262: (1,)})) == (400, "invalid_image")


@pytest.mark.parametrize("num_segments", [1, 100])
def test_very_many_jpegs_in_tiff_are_quick(num_segments: int) -> None:
    gray = save(Image.new("L", (16, 16)), "JPEG", optimize=True)
    jpeg = gray[:2] + b"\xff\xfe\0\2" * num_segments + gray[2:]
    count = min(65_536, (16 << 20) // len(jpeg))
    places = {324: tuple(range(8, 8 + count * len(jpeg), len(jpeg))), 325: (len(jpeg),) * count}
    tags = {258: (8,), 259: (7,), 262: (1,), 322: (16,), 323: (16,), **places}
    data = tiff(16, 16 * count, jpeg * count, tags)
    data = data.replace(struct.pack("<HHII", 273, 4, 1, 8), struct.pack("<HHII", 700, 4, 1, 8))
    data = data.replace(struct.pack("<HHI", 279, 4, 1), struct.pack("<HHI", 701, 4, 1))
    assert outcome(data)[0] in (200, 400)


@pytest.mark.parametrize("tag", [259, 277, 322, 323])
@pytest.mark.parametrize("type_", [8, 9, 16])
def test_tiff_numbers_of_types_that_only_decoders_read_are_refused(tag: int, type_: int) -> None:
    assert outcome(small_tiff({tag: (type_, 1, b"\x10\0\0\0")}, bytes(64))) == (400, "invalid_image")


@pytest.mark.parametrize(
    "places",
    [
        {279: (3, 0, b"")},  # no sizes
        {324: (4, 1, AT), 325: (4, 1, AT)},  # strips and tiles
        {324: (4, 1, AT)},
        {273: (4, 2, AT)},  # more offsets than sizes
        {279: (9, 1, b"\1\0\0\0")},  # a signed size
    ],
)
def test_jpegs_in_tiff_with_ambiguous_places_are_refused(
    places: dict[int, tuple[int, int, bytes]],
) -> None:
    jpeg = save(Image.new("L", (16, 16)), "JPEG")
    size = struct.pack("<I", len(jpeg))
    plain = {259: (3, 1, b"\7\0\0\0"), 273: (4, 1, AT), 279: (4, 1, size)}
    assert outcome(small_tiff(plain, jpeg)) == (200, "")
    refused_unread(small_tiff({**plain, **places}, jpeg))


def test_jpegs_in_tiff_that_overlap_are_refused() -> None:
    jpeg = cmyk_jpeg(64, 32) + bytes(500)
    size = len(jpeg)
    apart = {273: (8, 8 + size), 279: (size, size), 278: (32,)}
    assert outcome(jpeg_tiff(64, 64, jpeg * 2, apart)) == (200, "")
    refused_unread(jpeg_tiff(64, 64, jpeg, {**apart, 273: (8, 9), 279: (size, size - 1)}))


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_truncated_jpeg_in_tiff_is_refused(share: float) -> None:
    noise = save(Image.effect_noise((128, 96), 60), "JPEG")
    tags: dict[int, tuple[int, ...]] = {258: (8,), 259: (7,), 262: (1,), 277: (1,), 278: (96,)}
    assert outcome(tiff(128, 96, noise, tags)) == (200, "")
    assert outcome(tiff(128, 96, noise[: int(len(noise) * share)], tags)) == (400, "invalid_image")


def test_jpeg_in_tiff_may_have_bytes_after_its_end() -> None:
    pixels = save(Image.effect_noise((128, 96), 60), "JPEG") + b"\0\0\0"
    assert outcome(tiff(128, 96, pixels, {258: (8,), 259: (7,), 262: (1,), 277: (1,), 278: (96,)})) == (
        200,
        "",
    )

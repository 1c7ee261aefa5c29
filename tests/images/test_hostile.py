"""Hostile PNG, JPEG, GIF and BMP files: bounded time, bounded memory, or a refusal."""

from __future__ import annotations

import random
import struct
import zlib

import pytest
from PIL import Image

from service.images.containers import READERS
from service.images.image_file import ImageLimits, read_header
from tests.support.app import Service
from tests.support.broken_files import SEEDS, mutated
from tests.support.hostile import LIMITS, outcome
from tests.support.image_files import chunk, save

FUZZ_LIMITS = ImageLimits(max_image_bytes=1 << 20, max_image_pixels=4_000_000)


@pytest.mark.parametrize("name", SEEDS)
def test_whole_files_are_decoded_and_truncated_files_are_decoded_or_called_broken(name: str) -> None:
    data = SEEDS[name]
    assert outcome(data, FUZZ_LIMITS) == (200, "")
    for size in range(0, len(data), 1 + len(data) // 60):
        assert outcome(data[:size], FUZZ_LIMITS)[0] in (200, 400)
    assert outcome(data[: len(data) // 2], FUZZ_LIMITS)[0] in (200, 400)


@pytest.mark.parametrize("name", SEEDS)
def test_mutations_give_an_image_or_a_refusal(name: str) -> None:
    for index in range(250):
        rng = random.Random(f"{name} {index}")
        data = mutated(SEEDS[name], rng)
        if index % 3 == 0:
            data = mutated(data or b"\0", rng)
        outcome(data, FUZZ_LIMITS)


@pytest.mark.parametrize("name", SEEDS)
def test_mutations_are_answered_over_http_as_well(name: str, service: Service) -> None:
    rng = random.Random(name)
    for _ in range(20):
        response = service.embed(mutated(SEEDS[name], rng) or b"\0")
        assert response.status_code in (200, 400, 413, 415), response.text


PNG_HEAD, PNG_REST = SEEDS["png"][:33], SEEDS["png"][33:]


BOMB = zlib.compress(bytes(1 << 20), 9)


@pytest.mark.parametrize(
    "kind_and_body",
    [
        (b"zTXt", b"key\0\0" + BOMB),
        (b"iTXt", b"key\0\1\0\0\0" + zlib.compress(b"\xff" * (1 << 20), 9)),
        (b"iCCP", b"key\0\0" + BOMB),
        (b"tEXt", b"key\0" + b"x" * 1000),
        (b"tEXt", b"transparency\0x"),
        (b"tEXt", b"exif\0x"),
    ],
)
def test_png_text_and_profiles_are_not_inflated(kind_and_body: tuple[bytes, bytes]) -> None:
    extra = chunk(*kind_and_body)
    count = min(15_000, (19 << 20) // len(extra))
    assert outcome(PNG_HEAD + extra * count + PNG_REST) == (200, "")
    assert outcome(PNG_REST[:0] + PNG_HEAD + PNG_REST[:-12] + extra * count + PNG_REST[-12:]) == (200, "")


def test_png_of_a_million_chunks_is_refused() -> None:
    assert outcome(PNG_HEAD + chunk(b"teSt", b"") * 1_000_000 + PNG_REST) == (400, "invalid_image")
    assert outcome(PNG_HEAD + chunk(b"IDAT", b"") * 1_000_000 + PNG_REST) == (400, "invalid_image")


@pytest.mark.parametrize("kind", [b"IDAT", b"tRNS"])
def test_png_of_very_many_chunks_that_are_read_is_refused(kind: bytes) -> None:
    empty = chunk(kind, b"" if kind == b"IDAT" else bytes(6))
    assert outcome(PNG_HEAD + empty * 60_000 + PNG_REST) == (400, "invalid_image")


def test_adjacent_chunks_of_a_png_become_one_part() -> None:
    plain = READERS["PNG"](PNG_HEAD + PNG_REST)
    many = PNG_HEAD + chunk(b"IDAT", b"") * 4000 + chunk(b"teSt", b"") * 1000 + PNG_REST
    stored = READERS["PNG"](many)
    assert len(stored.parts) <= len(plain.parts) + 1
    joined, alone = b"".join(stored.parts), b"".join(plain.parts)
    assert joined == alone[:33] + chunk(b"IDAT", b"") * 4000 + alone[33:]
    assert outcome(many) == (200, "")


def test_png_with_two_headers_or_without_its_palette_is_refused() -> None:
    second = chunk(b"IHDR", struct.pack(">II5B", 9000, 7000, 8, 2, 0, 0, 0))
    assert outcome(PNG_HEAD + second + PNG_REST) == (400, "invalid_image")
    assert outcome(SEEDS["png-palette"].replace(b"PLTE", b"plTE")) == (400, "invalid_image")


def test_png_whose_data_inflate_beyond_its_size_takes_bounded_memory() -> None:
    head = PNG_HEAD[:8] + chunk(b"IHDR", struct.pack(">II5B", 8, 8, 8, 2, 0, 0, 0))
    data = head + chunk(b"IDAT", zlib.compress(bytes(200 << 20), 9)) + chunk(b"IEND", b"")
    assert outcome(data)[0] in (200, 400)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (PNG_HEAD[:8] + chunk(b"IHDR", struct.pack(">II5B", 8192, 8192, 8, 2, 0, 0, 0)) + PNG_REST, 400),
        (
            PNG_HEAD[:8] + chunk(b"IHDR", struct.pack(">II5B", 1 << 30, 1 << 30, 8, 2, 0, 0, 0)) + PNG_REST,
            413,
        ),
        (SEEDS["gif"][:6] + struct.pack("<HH", 65_535, 65_535) + SEEDS["gif"][10:], 413),
        (SEEDS["bmp"][:18] + struct.pack("<ii", 8192, 8192) + SEEDS["bmp"][26:], 400),
        (SEEDS["bmp"][:18] + struct.pack("<ii", 1 << 20, 1 << 20) + SEEDS["bmp"][26:], 413),
        (SEEDS["bmp"][:18] + struct.pack("<ii", -5, 5) + SEEDS["bmp"][26:], 400),
        (b"RIFF\xff\0\0\0WEBPVP8X\x0a\0\0\0\x10\0\0\0\xff\x3f\0\xff\x3f\0" + bytes(50), 413),
        (b"RIFF\xff\0\0\0WEBPVP8X\x0a\0\0\0\x10\0\0\0\xff\x1f\0\xff\x1f\0" + bytes(50), 400),
    ],
)
def test_files_with_fewer_pixels_than_their_header_states_are_refused(data: bytes, status: int) -> None:
    assert outcome(data)[0] == status


def test_jpeg_with_fewer_pixels_than_its_header_states_is_refused() -> None:
    data = SEEDS["jpeg"]
    at = data.index(b"\xff\xc0") + 5
    large = data[:at] + struct.pack(">HH", 8000, 8000) + data[at + 4 :]
    assert outcome(large) == (400, "invalid_image")
    assert outcome(large[:-2] + bytes(125_000))[0] in (200, 400)
    assert outcome(data[:at] + struct.pack(">HH", 65_000, 65_000) + data[at + 4 :]) == (
        413,
        "too_many_pixels",
    )


def test_jpeg_with_millions_of_segments_or_much_junk_is_quick() -> None:
    data = SEEDS["jpeg"]
    for filler in (b"\xff\xfe\0\2", b"\xff", b"\0", b"\xff\0", b"\xff\x01"):
        assert outcome(data[:2] + filler * (10_000_000 // len(filler)) + data[2:])[0] in (200, 400)
    scan = data.index(b"\xff\xda")
    assert outcome(data[:scan] + b"\xff\xfe\0\2" * 4_000_000 + data[scan:])[0] in (200, 400)


def test_progressive_jpeg_is_served_up_to_a_number_of_scans() -> None:
    for side, most in ((6000, 16), (700, 1024)):
        data = save(Image.new("RGB", (side, side)), "JPEG", progressive=True)
        scan = data[data.rindex(b"\xff\xda") : -2]
        missing = most - data.count(b"\xff\xda")
        assert outcome(data[:-2] + scan * missing + data[-2:])[0] == 200
        assert outcome(data[:-2] + scan * (missing + 1) + data[-2:]) == (400, "invalid_image")


def test_scans_are_limited_if_the_first_scan_lacks_a_component() -> None:
    data = save(Image.new("CMYK", (600, 600)), "JPEG")
    at = data.rindex(b"\xff\xda")
    scan = b"\xff\xda\0\x0c\3" + data[at + 5 : at + 11] + b"\0\x3f\0" + data[at + 16 : -2]
    assert outcome(data[:at] + scan * 1100 + data[-2:]) == (400, "invalid_image")
    assert read_header(data[:at] + scan + data[-2:], LIMITS).width == 600


def gif_with(before_frame: bytes) -> bytes:
    data = SEEDS["gif-animated"]
    palette_end = 13 + (3 << (data[10] & 7) + 1)
    return data[:palette_end] + before_frame + data[palette_end:]


def test_gif_with_endless_comments_is_refused() -> None:
    assert outcome(gif_with(b"\x21\xfe" + b"\1x" * 9_000_000 + b"\0")) == (400, "invalid_image")
    assert outcome(gif_with(b"\x21\xfe\1x\0" * 3_000_000)) == (400, "invalid_image")
    assert outcome(gif_with(b"\x21\xfe" + b"\1x" * 1000 + b"\0")) == (200, "")


def test_gif_frame_larger_than_its_screen_is_limited() -> None:
    data = SEEDS["gif"]
    at = data.index(b"\x2c\0\0\0\0")
    huge = data[: at + 5] + struct.pack("<HH", 65_535, 65_535) + data[at + 9 :]
    assert outcome(huge) == (413, "too_many_pixels")
    disposed = b"\x21\xf9\4\x08\0\0\0\0" + data[at : at + 5] + struct.pack("<HH", 9000, 7000) + data[at + 9 :]
    assert outcome(data[:at] + disposed) == (400, "invalid_image")


def test_run_length_bmp_of_the_largest_size_served_is_quick() -> None:
    info = struct.pack("<IiiHHIIiiII", 40, 2048, 2048, 1, 8, 1, 0, 0, 0, 2, 0)
    data = b"BM" + struct.pack("<IHHI", 0, 0, 0, 62) + info + b"\0\0\xc8\0\0\xc8\0\0"
    assert outcome(data + b"\1\0\0\0" * 2048)[0] in (200, 400)
    assert outcome(data + b"\1\0" * 500_000)[0] in (200, 400)
    assert outcome(data + b"\1\0" * (9 << 20)) == (415, "unsupported_image_format")

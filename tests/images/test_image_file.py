"""Images of every format and colour become the right pixels."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from service.images.image_file import read_header
from tests.support.image_files import chunk, save, tiff
from tests.support.pictures import FORMATS, HEIGHT, LIMITS, WIDTH, picture, worst


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x010F] = "a maker with a name"
    tags[0x0112] = orientation
    return tags


def png(width: int, height: int, depth: int, color: int, rows: bytes, *extra: tuple[bytes, bytes]) -> bytes:
    """A PNG written by hand; `rows` without filter bytes, `extra` chunks go before the pixels."""
    stride = len(rows) // height
    raw = b"".join(b"\0" + rows[y * stride : (y + 1) * stride] for y in range(height))
    header = struct.pack(">II5B", width, height, depth, color, 0, 0, 0)
    chunks = [(b"IHDR", header), *extra, (b"IDAT", zlib.compress(raw)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, body) for kind, body in chunks)


@pytest.mark.parametrize(("format_", "options", "tolerance"), FORMATS)
def test_every_format_is_decoded_to_its_pixels(format_: str, options: dict[str, Any], tolerance: int) -> None:
    data = save(Image.fromarray(picture()), format_, **options)
    assert read_header(data, LIMITS).format == format_
    assert worst(data, picture()) <= tolerance


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("format_", "options", "tolerance"),
    [row for row in FORMATS if row[0] != "BMP" and row[1].get("compression") != "jpeg"],
)
def test_orientation_is_applied_once(
    format_: str, options: dict[str, Any], tolerance: int, orientation: int
) -> None:
    data = save(Image.fromarray(picture()), format_, exif=exif(orientation), **options)
    turned = Image.fromarray(picture())
    turned.getexif()[0x0112] = orientation
    assert worst(data, np.asarray(ImageOps.exif_transpose(turned))) <= tolerance


def test_big_endian_exif_and_exif_behind_the_pixels_are_read() -> None:
    body = b"MM\0*" + struct.pack(">IHHHIHH", 8, 1, 0x0112, 3, 1, 6, 0)
    upright = np.rot90(picture(), -1)
    plain = save(Image.fromarray(picture()), "PNG")
    assert worst(plain[:-12] + chunk(b"eXIf", body) + plain[-12:], upright) == 0
    jpeg = save(Image.fromarray(picture()), "JPEG", quality=95, subsampling=0, exif=b"Exif\0\0" + body)
    assert worst(jpeg, upright) <= 14


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP", "AVIF"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"II",
        b"XX*\0\x08\0\0\0",
        b"II*\0\xff\xff\xff\xff",
        b"II*\0\x08\0\0\0\xff\xff",
        b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHII", 0x0112, 3, 1, 9),
        b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHII", 0x0112, 5, 1, 1 << 31),
        b"II*\0\x08\0\0\0\x02\0" + struct.pack("<HHII", 0x010F, 2, 1 << 31, 1 << 31),
    ],
)
def test_malformed_exif_is_ignored(format_: str, body: bytes) -> None:
    image = Image.fromarray(picture())
    if format_ == "PNG":
        plain = save(image, format_)
        data = plain[:33] + chunk(b"eXIf", body) + plain[33:]
    elif format_ == "AVIF":
        good = b"Exif\0\0" + exif(1).tobytes()[6:].ljust(len(body), b"\0")
        data = save(image, format_, exif=good)
        at = data.index(good[6:14])
        data = data[:at] + body + data[at + len(body) :]
    else:
        data = save(image, format_, exif=b"Exif\0\0" + body)
    assert read_header(data, LIMITS).decode().shape == (HEIGHT, WIDTH, 3)


def test_gray_of_one_and_eight_bits_with_and_without_alpha() -> None:
    gray = Image.fromarray(picture()).convert("L")
    expected = np.repeat(np.asarray(gray)[..., np.newaxis], 3, 2)
    for format_, tolerance in (("PNG", 0), ("TIFF", 0), ("BMP", 0), ("JPEG", 12), ("GIF", 0)):
        assert worst(save(gray, format_), expected) <= tolerance
    bits = gray.point(lambda value: 255 if value > 110 else 0).convert("1")
    black_and_white = np.asarray(bits.convert("RGB"))
    for format_ in ("PNG", "TIFF", "BMP", "GIF"):
        assert worst(save(bits, format_), black_and_white) == 0
    assert worst(save(bits, "TIFF", compression="group4"), black_and_white) == 0
    faded = Image.merge("LA", (gray, Image.new("L", gray.size, 128)))
    half = np.rint(expected * (128 / 255) + 255 * (127 / 255))
    for format_ in ("PNG", "TIFF"):
        assert worst(save(faded, format_), half) <= 1


@pytest.mark.parametrize("format_", ["PNG", "WEBP", "TIFF", "AVIF"])
def test_alpha_is_laid_over_white(format_: str) -> None:
    alpha = np.full((HEIGHT, WIDTH), 255, np.uint8)
    alpha[:, :16], alpha[:, 16:32] = 0, 64
    rgba = np.dstack([picture(), alpha])
    weight = alpha[..., np.newaxis] / 255
    expected = np.rint(picture() * weight + 255 * (1 - weight))
    options: dict[str, Any] = {"WEBP": {"lossless": True}, "AVIF": {"quality": 100, "subsampling": "4:4:4"}}
    data = save(Image.fromarray(rgba, "RGBA"), format_, **options.get(format_, {}))
    assert worst(data, expected) <= (6 if format_ == "AVIF" else 1)


def test_premultiplied_alpha_in_tiff() -> None:
    pixels = bytes((100, 50, 0, 128)) * 4
    rgba = {258: (8, 8, 8, 8), 262: (2,), 277: (4,), 338: (1,)}
    assert worst(tiff(2, 2, pixels, rgba), np.full((2, 2, 3), (227, 177, 127))) <= 1
    la = {258: (8, 8), 262: (1,), 277: (2,), 338: (1,)}
    assert worst(tiff(2, 2, bytes((60, 128)) * 4, la), np.full((2, 2, 3), 187)) <= 1


PALETTE = (b"PLTE", bytes((200, 0, 0, 0, 200, 0, 0, 0, 200)))


@pytest.mark.parametrize(
    ("transparency", "expected"),
    [
        (None, [(200, 0, 0), (0, 200, 0), (0, 0, 200)]),
        (b"\xff\x00", [(200, 0, 0), (255, 255, 255), (0, 0, 200)]),
        (b"\x80\x00\x40", [(227, 127, 127), (255, 255, 255), (191, 191, 241)]),
    ],
)
def test_palette_with_every_form_of_transparency(
    transparency: bytes | None, expected: list[tuple[int, int, int]]
) -> None:
    extra = [PALETTE] if transparency is None else [PALETTE, (b"tRNS", transparency)]
    assert worst(png(3, 1, 8, 3, bytes((0, 1, 2)), *extra), np.array([expected])) <= 1


def test_palette_of_two_bits_and_of_tiff_and_bmp() -> None:
    assert (
        worst(
            png(3, 1, 2, 3, bytes((0b00011000,)), PALETTE),
            np.array([[(200, 0, 0), (0, 200, 0), (0, 0, 200)]]),
        )
        == 0
    )
    few = Image.fromarray(picture()).quantize(16)
    for format_ in ("TIFF", "BMP", "PNG", "GIF"):
        assert worst(save(few, format_), np.asarray(few.convert("RGB"))) == 0


@pytest.mark.parametrize(
    ("depth", "color", "rows", "transparent", "expected"),
    [
        (1, 0, b"\x40", (1,), [(0,) * 3, (255,) * 3, (0,) * 3]),
        (1, 0, b"\x40", (0,), [(255,) * 3, (255,) * 3, (255,) * 3]),
        (2, 0, bytes((0b00011000,)), (1,), [(0,) * 3, (255,) * 3, (170,) * 3]),
        (4, 0, bytes((0x03, 0x70)), (3,), [(0,) * 3, (255,) * 3, (119,) * 3]),
        (8, 0, bytes((0, 9, 200)), (9,), [(0,) * 3, (255,) * 3, (200,) * 3]),
        (16, 0, struct.pack(">3H", 0, 2570, 51400), (2570,), [(0,) * 3, (255,) * 3, (200,) * 3]),
        (8, 2, bytes((1, 2, 3, 4, 5, 6, 7, 8, 9)), (4, 5, 6), [(1, 2, 3), (255,) * 3, (7, 8, 9)]),
        (
            16,
            2,
            struct.pack(">9H", 257, 0, 0, 2570, 0, 9, 0, 0, 51400),
            (2570, 0, 9),
            [(1, 0, 0), (255,) * 3, (0, 0, 200)],
        ),
    ],
)
def test_transparent_colour_of_png(
    depth: int, color: int, rows: bytes, transparent: tuple[int, ...], expected: list[tuple[int, ...]]
) -> None:
    body = struct.pack(f">{len(transparent)}H", *transparent)
    assert worst(png(3, 1, depth, color, rows, (b"tRNS", body)), np.array([expected])) == 0


SIXTEEN = np.array([[0, 1, 128, 129], [257, 30_000, 65_406, 65_535]], np.uint16)


SIXTEEN_AS_EIGHT = np.repeat(np.rint(SIXTEEN / 257)[..., np.newaxis], 3, 2)


def test_sixteen_bit_gray_is_scaled_and_not_clipped() -> None:
    assert worst(save(Image.fromarray(SIXTEEN), "PNG"), SIXTEEN_AS_EIGHT) == 0
    for options in ({}, {"compression": "tiff_lzw"}):
        assert worst(save(Image.fromarray(SIXTEEN), "TIFF", **options), SIXTEEN_AS_EIGHT) == 0
    assert worst(save(Image.fromarray(SIXTEEN.astype(np.int32)), "TIFF"), SIXTEEN_AS_EIGHT) == 0
    tags = {258: (16,), 262: (1,)}
    assert worst(tiff(4, 2, SIXTEEN.astype(">u2").tobytes(), tags, ">"), SIXTEEN_AS_EIGHT) == 0


def test_sixteen_bit_gray_that_starts_at_white_and_twelve_bits() -> None:
    white_is_zero = tiff(4, 2, SIXTEEN.astype("<u2").tobytes(), {258: (16,), 262: (0,)})
    assert worst(white_is_zero, 255 - SIXTEEN_AS_EIGHT) == 0
    twelve = tiff(2, 1, bytes((0xFF, 0xF8, 0x00)), {258: (12,), 262: (1,)})
    assert worst(twelve, np.repeat(np.array([[[255], [128]]]), 3, 2)) <= 1


def test_sixteen_bit_colour() -> None:
    rows = struct.pack(">6H", 0, 32_896, 65_535, 257, 514, 51_400)
    assert worst(png(2, 1, 16, 2, rows), np.array([[(0, 128, 255), (1, 2, 200)]])) == 0
    with_alpha = struct.pack(">8H", 0, 0, 0, 0, 51_400, 0, 0, 65_535)
    assert worst(png(2, 1, 16, 6, with_alpha), np.array([[(255, 255, 255), (200, 0, 0)]])) == 0


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "LAB"])
def test_other_colour_spaces(mode: str) -> None:
    image = Image.fromarray(picture())
    if mode == "LAB":
        flat = Image.merge("LAB", [Image.new("L", (4, 4), value) for value in (255, 128, 128)])
        assert worst(save(flat, "TIFF"), np.full((4, 4, 3), 255)) <= 2
        return
    assert worst(save(image.convert(mode), "TIFF"), picture()) <= 3
    assert worst(save(image.convert(mode), "JPEG", quality=95, subsampling=0), picture()) <= 16


def test_adobe_cmyk_jpeg_counts_ink_downwards() -> None:
    cyan = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    data = save(cyan, "JPEG", quality=95)
    assert b"Adobe" in data
    assert worst(data, np.full((16, 16, 3), (0, 255, 255))) <= 3

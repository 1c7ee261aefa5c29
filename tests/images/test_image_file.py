from __future__ import annotations

import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import skimage
from PIL import Image, ImageOps

from service.errors import ApiError
from service.images.formats import SERVED_FORMATS
from service.images.image_file import ImageLimits, read_header
from tests.support.image_files import chunk, save, tiff

LIMITS = ImageLimits(max_image_bytes=20 << 20, max_image_pixels=2**26)
WIDTH, HEIGHT = 48, 32
Array = npt.NDArray[Any]


def picture() -> npt.NDArray[np.uint8]:
    """Four smooth quarters of different colours, so that every rotation and flip shows."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    rgb = np.empty((HEIGHT, WIDTH, 3), np.uint8)
    rgb[..., 0] = 40 + 170 * (x >= WIDTH // 2)
    rgb[..., 1] = 60 + 120 * (y >= HEIGHT // 2)
    rgb[..., 2] = 50 + 2 * x + y
    return rgb


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


def worst(data: bytes, expected: Array) -> int:
    """The largest difference between decoded and expected pixels."""
    rgb = read_header(data, LIMITS).decode()
    assert rgb.dtype == np.uint8
    assert rgb.flags.c_contiguous
    assert rgb.flags.writeable
    assert rgb.shape == expected.shape
    header = read_header(data, LIMITS)
    assert (header.height, header.width) == expected.shape[:2]
    return int(np.abs(rgb.astype(int) - expected.astype(int)).max())


def refusal(data: bytes, limits: ImageLimits = LIMITS) -> tuple[int, str, str]:
    with pytest.raises(ApiError) as caught:
        read_header(data, limits).decode()
    assert caught.value.param is None
    return caught.value.status, caught.value.code, caught.value.message


FORMATS: list[tuple[str, dict[str, Any], int]] = [
    ("JPEG", {"quality": 95, "subsampling": 0}, 14),
    ("JPEG", {"quality": 95, "subsampling": 0, "progressive": True}, 14),
    ("PNG", {}, 0),
    ("WEBP", {"lossless": True}, 0),
    ("WEBP", {"quality": 95}, 60),
    ("BMP", {}, 0),
    ("TIFF", {}, 0),
    ("TIFF", {"compression": "tiff_lzw"}, 0),
    ("TIFF", {"compression": "tiff_adobe_deflate"}, 0),
    ("TIFF", {"compression": "packbits"}, 0),
    ("TIFF", {"compression": "zstd"}, 0),
    ("TIFF", {"compression": "jpeg", "quality": 95}, 60),
    ("TIFF", {"big_tiff": True}, 0),
    ("AVIF", {"quality": 95, "subsampling": "4:4:4"}, 14),
]


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


def test_only_the_first_frame_of_an_animation_is_decoded() -> None:
    frames = [Image.new("RGB", (16, 16), color) for color in ("#c80000", "#00c800", "#0000c8")]
    red = np.full((16, 16, 3), (200, 0, 0))
    for format_, tolerance in (("GIF", 0), ("PNG", 0), ("WEBP", 4), ("AVIF", 4), ("TIFF", 0)):
        options: dict[str, Any] = {"lossless": True} if format_ == "WEBP" else {}
        data = save(frames[0], format_, save_all=True, append_images=frames[1:], **options)
        assert worst(data, red) <= tolerance
    gif = save(frames[0], "GIF", save_all=True, append_images=frames[1:])
    second = gif.index(b"\x21\xf9", gif.index(b"\x2c"))
    assert worst(gif[:second] + b"garbage" * 9, red) == 0


def test_apng_shows_its_default_image() -> None:
    first, *rest = (Image.new("RGB", (8, 8), color) for color in ("#c80000", "#00c800", "#0000c8"))
    data = save(first, "PNG", save_all=True, append_images=rest, default_image=True)
    assert worst(data, np.full((8, 8, 3), (200, 0, 0))) == 0


def test_gif_transparency_and_screen_around_a_smaller_frame_are_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 0, 0])
    image.putdata([0, 1])
    data = save(image, "GIF", transparency=0)
    assert worst(data, np.array([[(255, 255, 255), (200, 0, 0)]])) == 0
    plain = save(image, "GIF")
    at = plain.index(b"\x2c", 13 + 6)
    moved = (
        plain[:6] + struct.pack("<HH", 4, 3) + plain[10 : at + 1] + struct.pack("<HH", 1, 2) + plain[at + 5 :]
    )
    expected = np.full((3, 4, 3), 255)
    expected[2, 1:3] = [(10, 20, 30), (200, 0, 0)]
    assert worst(moved, expected) == 0


def test_run_length_bmp_is_served_up_to_a_size() -> None:
    def bmp(width: int, height: int, pixels: bytes) -> bytes:
        info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(pixels), 0, 0, 2, 0)
        return (
            b"BM" + struct.pack("<IHHI", 62 + len(pixels), 0, 0, 62) + info + b"\0\0\xc8\0\0\xc8\0\0" + pixels
        )

    assert worst(bmp(3, 1, b"\x02\x00\x01\x01\0\1"), np.array([[(200, 0, 0), (200, 0, 0), (0, 200, 0)]])) == 0
    assert refusal(bmp(4096, 4096, b"\1\0\0\0" * 4096))[:2] == (415, "unsupported_image_format")


def test_pillow_decodes_jpeg_that_strict_mode_refuses() -> None:
    data = save(Image.fromarray(picture()), "JPEG", quality=95, subsampling=0)
    junk = data[:2] + b"\xff\xfe\x00\x04abjunk" + data[2:]
    assert worst(junk, picture()) <= 14
    assert refusal(data[:-100])[:2] == (400, "invalid_image")


def test_photograph_is_decoded_as_by_pillow() -> None:
    data = (Path(skimage.__file__).parent / "data" / "rocket.jpg").read_bytes()
    header = read_header(data, LIMITS)
    assert (header.format, header.width, header.height) == ("JPEG", 640, 427)
    rgb = header.decode()
    with Image.open(io.BytesIO(data)) as reference:
        assert np.array_equal(rgb, np.asarray(reference.convert("RGB")))


def test_limits_are_inclusive_and_errors_state_both_numbers() -> None:
    data = save(Image.fromarray(picture()), "PNG")
    exact = ImageLimits(max_image_bytes=len(data), max_image_pixels=WIDTH * HEIGHT)
    assert read_header(data, exact).decode().shape == (HEIGHT, WIDTH, 3)
    few_bytes = ImageLimits(len(data) - 1, WIDTH * HEIGHT)
    status, code, message = refusal(data, few_bytes)
    assert (status, code) == (413, "image_too_large")
    assert f"{len(data):,}" in message
    assert f"{len(data) - 1:,}" in message
    for format_ in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"):
        few_pixels = ImageLimits(1 << 20, WIDTH * HEIGHT - 1)
        status, code, message = refusal(save(Image.fromarray(picture()), format_), few_pixels)
        assert (status, code) == (413, "too_many_pixels")
        assert "1,536" in message
        assert "1,535" in message


def test_limit_above_the_largest_size_of_decoders_is_refused() -> None:
    with pytest.raises(ValueError, match="178,956,970"):
        ImageLimits(max_image_bytes=1, max_image_pixels=178_956_971)


def test_empty_and_unknown_data_are_refused() -> None:
    assert refusal(b"") == (400, "empty_input", "the image is empty")
    for data in (b"\0", b"\xff\xd8", b"hello, world", np.random.default_rng(0).bytes(1000), b"BM", b"RIFF"):
        assert refusal(data)[:2] == (400, "invalid_image")


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
        (b'<?xml version="1.0"?>\n<!-- drawn -->\n<svg width="1"/>', "SVG"),
        (b"\xef\xbb\xbf  <!DOCTYPE svg PUBLIC '-//W3C//DTD SVG 1.1//EN' 'x'><svg >", "SVG"),
        (b"<svg:svg xmlns:svg='http://www.w3.org/2000/svg'>", "SVG"),
        ("\ufeff<svg width='1'>".encode("utf-16-le"), "SVG"),
        (b"\x1f\x8b", "gzip"),
        (zlib.compress(b"<svg width='1'/>", wbits=31), "SVG"),
        (zlib.compress(b"hello", wbits=31), "gzip"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64), "HEIC"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic" + bytes(64), "HEIC"),
        (b"\0\0\0\x18ftypisom\0\0\0\1isommp41" + bytes(64), "MP4"),
        (b"\0\0\0\x14ftypqt  \0\0\0\1qt  " + bytes(64), "QuickTime"),
        (b"\x1a\x45\xdf\xa3" + bytes(64), "WebM"),
        (b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(64), "JPEG XL"),
        (b"\xff\x0a" + bytes(64), "JPEG XL"),
        (b"%PDF-1.7\n", "PDF"),
        (b"PK\3\4" + bytes(64), "ZIP"),
        (b"Rar!\x1a\7\1\0", "RAR"),
        (b"7z\xbc\xaf\x27\x1c" + bytes(64), "7-Zip"),
        (bytes(257) + b"ustar\x0000", "tar"),
        (b"RIFF\xff\0\0\0AVI LIST", "AVI"),
        (b"\0\0\1\xba" + bytes(64), "MPEG"),
        (b"<!doctype html><html>", "HTML"),
        (b"<!DOCTYPE html>\n<html><body><svg width='1'></svg>", "HTML"),
        (b'{"images": []}', "JSON"),
        (b"II*\0\x10\0\0\0CR\2\0" + bytes(64), "camera raw"),
        (b"data:image/png;base64,iVBORw0KGgo=", "the text of a data: URI; send the bytes of the image"),
        (b"\n DATA:;base64,iVBORw0KGgo=", "the text of a data: URI; send the bytes of the image"),
        (b"data:,%89PNG", "the text of a data: URI; send the bytes of the image"),
        (tiff(2, 2, bytes(4), {258: (8,), 262: (1,), 50706: (1,)}), "camera raw"),
        (tiff(2, 2, bytes(4), {258: (8,), 262: (1,), 254: (1,), 330: (8,)}), "camera raw"),
        (tiff(2, 2, bytes(4), {258: (8,), 262: (1,), 259: (6,)}), "compression 6"),
        (tiff(2, 2, bytes(16), {258: (32,), 262: (1,), 339: (3,)}), "floating-point"),
        (tiff(2, 2, b"\xff" * 16, {258: (32,), 262: (1,), 339: (2,)}), "16 bits"),
        (tiff(2, 2, bytes(64), {258: (16,), 262: (32803,)}), "unusual pixel layout"),
        (b"\x89PNG\r\n\x1a\n" + chunk(b"CgBI", bytes(4)), "iOS"),
    ],
)
def test_known_formats_that_are_not_served_are_named(data: bytes, name: str) -> None:
    status, code, message = refusal(data)
    assert (status, code) == (415, "unsupported_image_format")
    assert name in message
    assert SERVED_FORMATS in message


@pytest.mark.parametrize("format_", ["ICO", "JPEG2000", "TGA", "PPM", "PCX", "SGI"])
def test_images_of_rare_formats_are_refused(format_: str) -> None:
    status, code, message = refusal(save(Image.new("RGB", (16, 16)), format_))
    assert (status, code) == (400, "invalid_image")
    assert SERVED_FORMATS in message


def test_message_for_broken_data_names_only_the_format() -> None:
    data = save(Image.fromarray(picture()), "PNG")
    assert refusal(data[:60]) == (400, "invalid_image", "the PNG data is broken or truncated")


def test_threads_may_decode_at_the_same_time() -> None:
    files = [save(Image.fromarray(picture()), format_, **options) for format_, options, _ in FORMATS] * 8
    alone = [read_header(data, LIMITS).decode() for data in files]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda data: read_header(data, LIMITS).decode(), files))
    assert all(np.array_equal(one, other) for one, other in zip(alone, together, strict=True))

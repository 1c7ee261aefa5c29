"""Animations, limits, and formats that are refused."""

from __future__ import annotations

import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skimage
from PIL import Image

from service.errors import ApiError
from service.images.formats import SERVED_FORMATS
from service.images.image_file import ImageLimits, read_header
from tests.support.image_files import chunk, save, tiff
from tests.support.pictures import FORMATS, HEIGHT, LIMITS, WIDTH, picture, worst


def refusal(data: bytes, limits: ImageLimits = LIMITS) -> tuple[int, str, str]:
    with pytest.raises(ApiError) as caught:
        read_header(data, limits).decode()
    assert caught.value.param is None
    return caught.value.status, caught.value.code, caught.value.message


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

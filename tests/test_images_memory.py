"""What decoding takes, and that strips of rows, which make it take less, do not show in the pixels."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from service.errors import UnsupportedMedia
from service.images import ImageLimits, read_header
from tests.image_files import save, tiff
from tests.measuring import measure

LIMITS = ImageLimits(max_image_bytes=20 << 20, max_image_pixels=2**26)
TURNED = Image.Exif()
TURNED[0x0112] = 6


def at_once(data: bytes) -> npt.NDArray[np.uint8]:
    """What Pillow makes of all rows together."""
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        if image.mode.startswith("I"):
            gray = np.asarray(image)
            shades = np.rint(gray / 257).astype(np.uint8)
            shades[gray == image.info.get("transparency", -1)] = 255
            return np.repeat(shades[..., np.newaxis], 3, 2)
        if not image.has_transparency_data:
            return np.array(image.convert("RGB"))
        rgba = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(rgba, mask=rgba)
        return np.array(white)


def noise(mode: str, width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(7)
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 1 << 16, (height, width), np.uint16))
    if mode == "P":
        image = Image.fromarray(rng.integers(0, 64, (height, width), np.uint8), "P")
        image.putpalette(rng.bytes(3 * 64))
        return image
    if mode == "PA":
        return noise("P", width, height).convert("PA")
    num_bands = len(Image.new(mode, (1, 1)).getbands())
    bands = [Image.fromarray(rng.integers(0, 256, (height, width), np.uint8)) for _ in range(num_bands)]
    return bands[0].convert("1") if mode == "1" else Image.merge(mode, bands)


STRIPS: list[tuple[str, str, dict[str, Any]]] = [
    ("PNG", "1", {}),
    ("PNG", "L", {}),
    ("PNG", "L", {"transparency": 9}),
    ("PNG", "LA", {}),
    ("PNG", "P", {}),
    ("PNG", "P", {"transparency": bytes(range(0, 256, 4))}),
    ("PNG", "P", {"transparency": 5}),
    ("PNG", "RGB", {}),
    ("PNG", "RGB", {"transparency": (1, 2, 3)}),
    ("PNG", "RGBA", {}),
    ("PNG", "I;16", {}),
    ("PNG", "I;16", {"transparency": 99}),
    ("GIF", "P", {"transparency": 5}),
    ("TIFF", "PA", {}),
    ("TIFF", "CMYK", {}),
    ("TIFF", "YCbCr", {}),
    ("TIFF", "LAB", {}),
]


def check_strips(data: bytes) -> None:
    assert np.array_equal(read_header(data, LIMITS).decode(), at_once(data))


@pytest.mark.parametrize(("format_", "mode", "options"), STRIPS)
def test_images_are_the_same_in_strips_of_rows_as_at_once(
    format_: str, mode: str, options: dict[str, Any]
) -> None:
    check_strips(save(noise(mode, 700, 401), format_, compress_level=1, **options))


@pytest.mark.parametrize("mode", ["P", "RGBA", "I;16"])
@pytest.mark.parametrize(("width", "height"), [(1, 300_000), (300_000, 1), (300_000, 2), (512, 1024)])
def test_strips_of_extreme_sizes(mode: str, width: int, height: int) -> None:
    check_strips(save(noise(mode, width, height), "PNG", compress_level=1))


def test_strips_of_what_only_tiff_has() -> None:
    width, height = 700, 401
    pixels = np.random.default_rng(7).bytes(2 * width * height)
    check_strips(tiff(width, height, pixels, {258: (8, 8), 262: (1,), 277: (2,), 338: (1,)}))
    check_strips(tiff(width, height, pixels, {258: (16,), 262: (1,)}, ">"))


def test_strips_of_a_frame_smaller_than_its_screen() -> None:
    data = save(noise("P", 700, 401), "GIF", transparency=5)
    at = data.index(b"\x2c\0\0\0\0")
    screen, frame = struct.pack("<HH", 800, 500), struct.pack("<HH", 60, 40)
    rgb = read_header(data[:6] + screen + data[10 : at + 1] + frame + data[at + 5 :], LIMITS).decode()
    expected = np.full((500, 800, 3), 255, np.uint8)
    expected[40:441, 60:760] = at_once(data)
    assert np.array_equal(rgb, expected)


def test_a_value_beyond_sixteen_bits_in_the_last_strip_is_seen() -> None:
    values = np.zeros((401, 700), np.int32)
    values[-1, -1] = 70_000
    header = read_header(save(Image.fromarray(values), "TIFF"), LIMITS)
    with pytest.raises(UnsupportedMedia):
        header.decode()


SIDE = 2048
LARGE: list[tuple[str, str, dict[str, Any]]] = [
    ("JPEG", "RGB", {}),
    ("JPEG", "RGB", {"exif": TURNED}),
    ("JPEG", "RGB", {"progressive": True, "subsampling": 0}),
    ("JPEG", "CMYK", {"progressive": True, "subsampling": 0}),
    ("PNG", "RGBA", {"compress_level": 1}),
    ("PNG", "P", {"compress_level": 1, "transparency": bytes(9)}),
    ("PNG", "RGB", {"compress_level": 1, "transparency": (1, 2, 3)}),
    ("PNG", "I;16", {"compress_level": 1}),
    ("GIF", "P", {"transparency": 5}),
    ("WEBP", "RGBA", {"lossless": True, "quality": 0, "method": 0}),
    ("AVIF", "RGBA", {"speed": 10, "subsampling": "4:4:4"}),
    ("TIFF", "RGBA", {"compression": "tiff_adobe_deflate", "strip_size": 1 << 30}),
]


@pytest.mark.parametrize(("format_", "mode", "options"), LARGE)
def test_decoding_takes_no_more_memory_than_the_header_says(
    format_: str, mode: str, options: dict[str, Any]
) -> None:
    image = noise(mode, 64, 64).resize((SIDE, SIDE), Image.Resampling.NEAREST)
    check_peak(save(image, format_, **options))


def test_a_tile_larger_than_its_image_counts() -> None:
    pixels = zlib.compress(bytes(SIDE * SIDE * 8), 1)
    tags = {258: (16,) * 4, 259: (8,), 262: (2,), 277: (4,), 322: (SIDE,), 323: (SIDE,), 338: (2,)}
    check_peak(tiff(64, 64, pixels, {**tags, 324: (8,), 325: (len(pixels),)}))


def check_peak(data: bytes) -> None:
    header = read_header(data, LIMITS)
    assert header.decoding_bytes <= LIMITS.max_decoding_bytes
    measured = measure(header.decode, max_seconds=60)
    assert measured.peak_growth_bytes <= header.decoding_bytes + (6 << 20)  # of a strip


def test_alpha_takes_less_than_half_the_memory_that_all_rows_at_once_would() -> None:
    image = noise("RGBA", 64, 64).resize((4096, 4096), Image.Resampling.NEAREST)
    header = read_header(save(image, "PNG", compress_level=1), LIMITS)
    assert measure(header.decode, max_seconds=60).peak_growth_bytes <= 8 * 4096 * 4096

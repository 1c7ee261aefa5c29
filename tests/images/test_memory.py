"""The memory that decoding takes, and pixels that do not depend on the strips of rows that reduce it."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from service.errors import UnsupportedMedia
from service.images.image_file import ImageLimits, read_header
from tests.support.image_files import save, tiff
from tests.support.webp_files import many_tables

LIMITS = ImageLimits(max_image_bytes=20 << 20, max_image_pixels=2**26)
TURNED = Image.Exif()
TURNED[0x0112] = 6


def at_once(data: bytes) -> npt.NDArray[np.uint8]:
    """The pixels that Pillow converts from all rows at once."""
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
def test_images_of_extreme_sizes_are_the_same_in_strips(mode: str, width: int, height: int) -> None:
    check_strips(save(noise(mode, width, height), "PNG", compress_level=1))


def test_layouts_of_tiff_are_the_same_in_strips() -> None:
    width, height = 700, 401
    pixels = np.random.default_rng(7).bytes(2 * width * height)
    check_strips(tiff(width, height, pixels, {258: (8, 8), 262: (1,), 277: (2,), 338: (1,)}))
    check_strips(tiff(width, height, pixels, {258: (16,), 262: (1,)}, ">"))


def test_frame_smaller_than_its_screen_is_the_same_in_strips() -> None:
    data = save(noise("P", 700, 401), "GIF", transparency=5)
    at = data.index(b"\x2c\0\0\0\0")
    screen, frame = struct.pack("<HH", 800, 500), struct.pack("<HH", 60, 40)
    rgb = read_header(data[:6] + screen + data[10 : at + 1] + frame + data[at + 5 :], LIMITS).decode()
    expected = np.full((500, 800, 3), 255, np.uint8)
    expected[40:441, 60:760] = at_once(data)
    assert np.array_equal(rgb, expected)


def test_value_beyond_sixteen_bits_in_the_last_strip_is_refused() -> None:
    values = np.zeros((401, 700), np.int32)
    values[-1, -1] = 70_000
    header = read_header(save(Image.fromarray(values), "TIFF"), LIMITS)
    with pytest.raises(UnsupportedMedia):
        header.decode()


SIDE = 2048
COLORS_16 = {258: (16,) * 4, 259: (8,), 262: (2,), 277: (4,), 338: (2,)}
LARGE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "jpeg": ("JPEG", "RGB", {}),
    "jpeg-turned": ("JPEG", "RGB", {"exif": TURNED}),
    "jpeg-progressive": ("JPEG", "RGB", {"progressive": True, "subsampling": 0}),
    "jpeg-cmyk-progressive": ("JPEG", "CMYK", {"progressive": True, "subsampling": 0}),
    "png-alpha": ("PNG", "RGBA", {"compress_level": 1}),
    "png-palette": ("PNG", "P", {"compress_level": 1, "transparency": bytes(9)}),
    "png-transparent-color": ("PNG", "RGB", {"compress_level": 1, "transparency": (1, 2, 3)}),
    "png-16": ("PNG", "I;16", {"compress_level": 1}),
    "gif": ("GIF", "P", {"transparency": 5}),
    "webp": ("WEBP", "RGBA", {"lossless": True, "quality": 0, "method": 0}),
    "avif": ("AVIF", "RGBA", {"speed": 10, "subsampling": "4:4:4"}),
    "tiff-one-strip": ("TIFF", "RGBA", {"compression": "tiff_adobe_deflate", "strip_size": 1 << 30}),
}

# The allocator returns freed blocks to the system, so that decoding reuses none.
ENVIRONMENT = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
PROGRAM = """
import sys
from pathlib import Path
from service.images.image_file import ImageLimits, read_header
from tests.support.measuring import measure, slowness

slowness()
for path in map(Path, sys.argv[1:]):
    header = read_header(path.read_bytes(), ImageLimits(2**24, 2**26))
    peak = measure(header.decode, max_seconds=60).peak_growth_bytes
    print(path.name, peak, header.decoding_bytes)
"""


def large(format_: str, mode: str, options: dict[str, Any]) -> bytes:
    image = noise(mode, 64, 64).resize((SIDE, SIDE), Image.Resampling.NEAREST)
    return save(image, format_, **options)


def large_tiffs() -> dict[str, bytes]:
    pixels = zlib.compress(bytes(SIDE * SIDE * 8), 1)
    tile = {322: (SIDE,), 323: (SIDE,), 324: (8,), 325: (len(pixels),)}
    return {
        "tiff-16-one-strip": tiff(SIDE, SIDE, pixels, {**COLORS_16, 278: (SIDE,)}),
        "tiff-16-one-tile": tiff(SIDE, SIDE, pixels, {**COLORS_16, **tile}),
        "tiff-tile-larger-than-image": tiff(64, 64, pixels, {**COLORS_16, **tile}),
    }


WEBP_TABLES = ["plain", "frame", "alpha"]


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    """The peak of decoding in a process of its own, and `decoding_bytes` of the header, by name."""
    folder = tmp_path_factory.mktemp("large")
    for name, data in {**{name: large(*how) for name, how in LARGE.items()}, **large_tiffs()}.items():
        (folder / name).write_bytes(data)
    for how in WEBP_TABLES:
        (folder / how).write_bytes(many_tables(how, 512))
    command = [sys.executable, "-c", PROGRAM, *map(str, folder.iterdir())]
    output = subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in output.splitlines()]
    return {name: (int(peak), int(said)) for name, peak, said in rows}


@pytest.mark.parametrize("name", [*LARGE, *large_tiffs(), *WEBP_TABLES])
def test_decoding_takes_at_most_decoding_bytes(name: str, peaks: dict[str, tuple[int, int]]) -> None:
    peak, said = peaks[name]
    assert peak <= said + (4 << 20)  # for a strip of rows
    assert said <= LIMITS.max_decoding_bytes


@pytest.mark.parametrize("name", ["png-alpha", "png-transparent-color", "png-palette"])
def test_strips_take_much_less_than_all_rows_at_once(name: str, peaks: dict[str, tuple[int, int]]) -> None:
    assert peaks[name][0] < 10 * SIDE * SIDE


@pytest.mark.parametrize("how", WEBP_TABLES)
def test_tables_of_lossless_webp_are_most_of_what_decoding_it_takes(
    how: str, peaks: dict[str, tuple[int, int]]
) -> None:
    peak, said = peaks[how]
    assert said / 2 < peak
    assert peak > 5 * 17 * 512 * 512

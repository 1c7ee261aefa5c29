"""Pictures with known pixels, and how decoded ones differ from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from service.images.image_file import ImageLimits, read_header

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

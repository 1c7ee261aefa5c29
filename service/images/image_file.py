"""Decodes the bytes of an image file to an RGB array, within limits.

simplejpeg decodes JPEG. Pillow decodes the other formats, and JPEGs that simplejpeg's strict mode refuses.
Only the first image of animations and multi-page files is decoded. Alpha is laid over white. Colour profiles
are ignored: values are taken as sRGB. Threads share no state and may decode at the same time. Knows nothing
of requests.

Sizes are checked before anything is decoded. So every `Exception` of a decoder means broken data, and becomes
400 `invalid_image` without the decoder's message. Only `MemoryError`, which is not the caller's fault, is
raised as it is.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, UnidentifiedImageError

from service.errors import ApiError, BadRequest, TooLarge
from service.images.containers import MAX_BYTES_PER_PIXEL, READERS, Stored
from service.images.formats import ImageFormat, sniff, unsupported
from service.images.jpeg import END, essential_jpeg, is_only_end_missing
from service.images.libtiff import silence_libtiff

MAX_PIXELS_SUPPORTED = 178_956_970
"""Pillow refuses larger images unless its global settings are changed."""

# Pillow decodes a run-length BMP in Python, slowly by the byte and by the pixel.
_MAX_RLE_BYTES, _MAX_RLE_PIXELS = 1 << 20, 1 << 22

_NAMES = {"WEBP": "WebP"}

# Pixels converted at once: few enough for the cache of a core, and enough to outweigh the cost of a call.
_STRIP_PIXELS = 1 << 18

Array = npt.NDArray[np.uint8]

silence_libtiff()


@dataclass(frozen=True)
class ImageLimits:
    """Limits of one image. Raises `ValueError` for more pixels than `MAX_PIXELS_SUPPORTED`."""

    max_image_bytes: int
    max_image_pixels: int

    def __post_init__(self) -> None:
        if self.max_image_pixels > MAX_PIXELS_SUPPORTED:
            raise ValueError(f"images of more than {MAX_PIXELS_SUPPORTED:,} pixels are not supported")

    @property
    def max_decoding_bytes(self) -> int:
        """The most that decoding one image takes, without the tables of a lossless WebP."""
        return self.max_image_pixels * MAX_BYTES_PER_PIXEL + self.max_image_bytes


@dataclass(frozen=True)
class ImageHeader:
    """The header of an image that is within the limits."""

    format: ImageFormat
    width: int  # as seen, after the EXIF orientation
    height: int
    _stored: Stored

    @property
    def decoding_bytes(self) -> int:
        """The peak of `decode`, at most: pixels of the image or of a larger part of it, tables and data."""
        stored = self._stored
        num_pixels = max(stored.width * stored.height, stored.piece_pixels)
        return num_pixels * stored.bytes_per_pixel + stored.extra_bytes + sum(map(len, stored.parts))

    def decode(self) -> npt.NDArray[np.uint8]:
        """RGB, upright: a C-contiguous, writable array [height, width, 3].

        Peak memory in bytes per pixel, measured at 4096 x 4096: JPEG 3.0, rotated 6.0, with many scans 6.0 to
        9.0; CMYK JPEG 7.3, with many scans 12.1; PNG, GIF, BMP and TIFF 4.2 to 7.6; TIFF of 16 bits in one
        strip 12.2; AVIF 5.8 to 13.4; WebP 16.2.

        Raises `BadRequest` (400, `invalid_image`) for broken or truncated data, and `UnsupportedMedia` (415)
        for an unusual layout.
        """
        stored = self._stored
        with _broken_data_as_error(self.format):
            rgb = _decode_jpeg(stored) if self.format == "JPEG" else _decode_pillow(self.format, stored)
            if rgb.shape != (stored.height, stored.width, 3):
                raise ValueError("the decoded size differs from the header")
            return upright(rgb, stored.orientation)


def read_header(data: bytes, limits: ImageLimits) -> ImageHeader:
    """Reads the header without decoding pixels. Takes microseconds for a JPEG.

    Raises `TooLarge` (413, `image_too_large` or `too_many_pixels`), `BadRequest` (400, `empty_input` or
    `invalid_image`) or `UnsupportedMedia` (415, `unsupported_image_format`).
    """
    if len(data) > limits.max_image_bytes:
        raise TooLarge(
            f"the image has {len(data):,} bytes; the limit is {limits.max_image_bytes:,}",
            code="image_too_large",
        )
    format_ = sniff(data)
    with _broken_data_as_error(format_):
        stored = READERS[format_](data)
        if stored.width < 1 or stored.height < 1:
            raise ValueError("the image has no pixels")
    _check_pixels(stored, limits.max_image_pixels)
    if not stored.is_plausible:
        raise _broken(format_)
    width, height = stored.width, stored.height
    if stored.orientation >= 5:
        width, height = height, width
    return ImageHeader(format_, width, height, stored)


def upright(rgb: npt.NDArray[np.uint8], orientation: int) -> npt.NDArray[np.uint8]:
    """Applies an EXIF orientation, 1 to 8, to an array [height, width, 3]."""
    if orientation == 1:
        return rgb
    pixels = rgb.view("V3")[..., 0]  # one item per pixel is copied faster
    if orientation >= 5:
        pixels = pixels.T
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    height, width = pixels.shape
    return np.ascontiguousarray(pixels).view(np.uint8).reshape(height, width, 3)


@contextmanager
def _broken_data_as_error(format_: ImageFormat) -> Iterator[None]:
    try:
        yield
    except (ApiError, MemoryError):
        raise
    except Exception as error:
        raise _broken(format_) from error


def _broken(format_: ImageFormat) -> BadRequest:
    name = _NAMES.get(format_, format_)
    return BadRequest(f"the {name} data is broken or truncated", code="invalid_image")


def _check_pixels(stored: Stored, max_pixels: int) -> None:
    num_pixels = stored.width * stored.height
    if num_pixels > max_pixels:
        raise TooLarge(
            f"the image has {num_pixels:,} pixels ({stored.width} x {stored.height}); "
            f"the limit is {max_pixels:,}",
            code="too_many_pixels",
        )
    if stored.piece_pixels > max_pixels:
        raise TooLarge(
            f"a part of the image has {stored.piece_pixels:,} pixels; the limit is {max_pixels:,}",
            code="too_many_pixels",
        )


def _decode_jpeg(stored: Stored) -> Array:
    """Pillow decodes files that simplejpeg refuses, unless pixels are missing at the end."""
    (data,) = stored.parts
    if stored.is_plain_jpeg:
        with suppress(ValueError):
            return _decode_simplejpeg(data, "RGB")
    jpeg = b"".join(essential_jpeg(bytes(data)))
    if is_only_end_missing(jpeg):
        with suppress(ValueError):
            pixels = _decode_simplejpeg(jpeg + END, "RGB" if stored.is_plain_jpeg else "CMYK")
            if stored.is_plain_jpeg:
                return pixels
            jpeg += END  # no pixel is missing, and Pillow knows how to make RGB of CMYK
    return _rgb(_load("JPEG", jpeg, stored), stored)


def _decode_simplejpeg(data: bytes | memoryview, colorspace: str) -> Array:
    pixels: Array = simplejpeg.decode_jpeg(data, colorspace)
    return pixels


def _decode_pillow(format_: ImageFormat, stored: Stored) -> npt.NDArray[np.uint8]:
    try:
        image = _load(format_, b"".join(stored.parts), stored)
    except UnidentifiedImageError:
        if format_ == "TIFF":  # its directory is sound, so Pillow does not know the layout of its pixels
            raise unsupported("TIFF with an unusual pixel layout") from None
        raise
    return _rgb(image, stored)


def _load(format_: ImageFormat, data: bytes, stored: Stored) -> Image.Image:
    """The image with its pixels decoded, as Pillow sees it."""
    with Image.open(io.BytesIO(data), formats=[format_]) as image:
        if image.size != ((stored.width, stored.height) if stored.frame is None else stored.frame[2:]):
            raise ValueError("the file states two sizes")
        if format_ == "BMP" and image.info["compression"] in (1, 2):
            _check_run_length(len(data), image.width * image.height)
        image.load()
        return image


def _check_run_length(num_bytes: int, num_pixels: int) -> None:
    if num_bytes > _MAX_RLE_BYTES or num_pixels > _MAX_RLE_PIXELS:
        raise unsupported(
            f"a run-length BMP of more than {_MAX_RLE_BYTES:,} bytes or {_MAX_RLE_PIXELS:,} pixels"
        )


def _rgb(image: Image.Image, stored: Stored) -> npt.NDArray[np.uint8]:
    """The pixels over white, as an array [height, width, 3]. A frame may cover only a part of it."""
    convert = _conversion(image, stored)
    x, y = (0, 0) if stored.frame is None else stored.frame[:2]
    rgb = np.empty((stored.height, stored.width, 3), np.uint8)
    if stored.frame is not None:
        rgb.fill(255)
    for top, strip in _strips(image):
        rgb[y + top : y + top + strip.height, x : x + strip.width] = convert(strip)
    return rgb


def _conversion(image: Image.Image, stored: Stored) -> Callable[[Image.Image], Array]:
    """A function that converts any rows of the image to RGB."""
    if image.mode == "F":
        raise unsupported("TIFF with floating-point pixels")
    if image.mode.startswith("I"):
        return _gray(image, stored)
    return _over_white if image.has_transparency_data else _opaque


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Yields (first row, rows) from top to bottom, because converting all rows at once takes much memory."""
    width, height = image.size
    num_rows = max(1, _STRIP_PIXELS // width)
    if height <= num_rows:
        yield 0, image
        return
    for top in range(0, height, num_rows):
        yield top, image.crop((0, top, width, min(height, top + num_rows)))


def _opaque(image: Image.Image) -> Array:
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _over_white(image: Image.Image) -> Array:
    if image.mode == "La":
        image = image.convert("LA")
    rgba = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(rgba, mask=rgba)
    return np.asarray(white)


def _gray(image: Image.Image, stored: Stored) -> Callable[[Image.Image], Array]:
    """A function that scales gray values of more than 8 bits, where Pillow would clip them."""
    scale = np.clip((np.arange(65_536) - stored.black) / (stored.white - stored.black), 0, 1)
    shades: Array = np.rint(scale * 255).astype(np.uint8)
    transparent = image.info.get("transparency")

    def convert(strip: Image.Image) -> Array:
        values = np.asarray(strip)
        if values.min() < 0 or values.max() > 65_535:
            raise unsupported("TIFF with gray values beyond 16 bits")
        gray: Array = shades[values]
        if transparent is not None:
            gray[values == transparent] = 255
        return gray[:, :, np.newaxis]  # one value for all three colours

    return convert

"""Bytes → RGB array, with limits.

JPEG is decoded by simplejpeg; what its strict mode refuses, and every other format, by Pillow. Of animations
and multi-page files the first image counts. Alpha is laid over white. Colour profiles are ignored: values are
taken as sRGB. No state is shared, so threads may decode at the same time. Knows nothing of requests.

Sizes are checked before anything is decoded, so every `Exception` out of a decoder means broken data and
becomes 400 `invalid_image`, without the decoder's words. Only `MemoryError`, our own fault, passes through.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, UnidentifiedImageError

from service.containers import READERS, Stored, essential_jpeg
from service.errors import ApiError, BadRequest, TooLarge
from service.formats import Format, sniff, unsupported

MAX_PIXELS_SUPPORTED = 178_956_970
"""Pillow refuses larger images unless its global settings are changed."""

# Pillow decodes a run-length BMP in Python, slowly by the byte and by the pixel.
_MAX_RLE_BYTES, _MAX_RLE_PIXELS = 1 << 20, 1 << 22

_NAMES = {"WEBP": "WebP"}


@dataclass(frozen=True)
class ImageLimits:
    """Raises `ValueError` for a limit over `MAX_PIXELS_SUPPORTED`."""

    max_image_bytes: int
    max_image_pixels: int

    def __post_init__(self) -> None:
        if self.max_image_pixels > MAX_PIXELS_SUPPORTED:
            raise ValueError(f"images of more than {MAX_PIXELS_SUPPORTED:,} pixels are not supported")


@dataclass(frozen=True)
class ImageHeader:
    """An image whose header was read and found within the limits."""

    format: Format
    width: int  # as seen, after the EXIF orientation
    height: int
    _stored: Stored

    def decode(self) -> npt.NDArray[np.uint8]:
        """RGB, upright: a C-contiguous, writable array [height, width, 3].

        At its peak it takes about 12 bytes a pixel for images with alpha, 3 for a JPEG. Raises `BadRequest`
        (400, `invalid_image`) for broken or truncated data, `UnsupportedMedia` (415) for an unusual layout.
        """
        stored = self._stored
        with _broken_data_as_error(self.format):
            rgb = _decode_jpeg(stored) if self.format == "JPEG" else _decode_pillow(self.format, stored)
            if rgb.shape != (stored.height, stored.width, 3):
                raise ValueError("pixels do not fit the header")
            return upright(rgb, stored.orientation)


def read_header(data: bytes, limits: ImageLimits) -> ImageHeader:
    """Reads the header, without decoding pixels; takes microseconds for a JPEG.

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
            raise ValueError("an image without pixels")
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
    pixels = rgb.view("V3")[..., 0]  # one item a pixel, which copies faster
    if orientation >= 5:
        pixels = pixels.T
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    height, width = pixels.shape
    return np.ascontiguousarray(pixels).view(np.uint8).reshape(height, width, 3)


@contextmanager
def _broken_data_as_error(format_: Format) -> Iterator[None]:
    try:
        yield
    except (ApiError, MemoryError):
        raise
    except Exception as error:
        raise _broken(format_) from error


def _broken(format_: Format) -> BadRequest:
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
            f"a tile of the image has {stored.piece_pixels:,} pixels; the limit is {max_pixels:,}",
            code="too_many_pixels",
        )


def _decode_jpeg(stored: Stored) -> npt.NDArray[np.uint8]:
    (data,) = stored.parts
    if stored.is_plain_jpeg:
        try:
            rgb: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB")
            return rgb
        except ValueError:  # strict: perhaps no more than a warning; Pillow decides
            pass
    return _rgb(_load("JPEG", b"".join(essential_jpeg(bytes(data))), stored), stored)


def _decode_pillow(format_: Format, stored: Stored) -> npt.NDArray[np.uint8]:
    try:
        image = _load(format_, b"".join(stored.parts), stored)
    except UnidentifiedImageError:
        if format_ == "TIFF":  # its directory is sound, so it is the kind of pixels that is unknown
            raise unsupported("TIFF with an unusual pixel layout") from None
        raise
    rgb = _rgb(image, stored)
    return rgb if stored.frame is None else _placed(rgb, stored)


def _load(format_: Format, data: bytes, stored: Stored) -> Image.Image:
    """The image with its pixels decoded, as Pillow sees it."""
    with Image.open(io.BytesIO(data), formats=[format_]) as image:
        if image.size != ((stored.width, stored.height) if stored.frame is None else stored.frame[2:]):
            raise ValueError("two sizes in one file")
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
    """The pixels over white, as an array [height, width, 3]."""
    if image.mode == "F":
        raise unsupported("TIFF with floating-point pixels")
    if image.mode.startswith("I"):
        return _gray(image, stored)
    if image.mode == "La":
        image = image.convert("LA")
    if not image.has_transparency_data:
        return np.array(image if image.mode == "RGB" else image.convert("RGB"))
    rgba = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(rgba, mask=rgba)
    return np.array(white)


def _gray(image: Image.Image, stored: Stored) -> npt.NDArray[np.uint8]:
    """Gray of more than 8 bits, scaled rather than clipped."""
    values = np.asarray(image)
    if values.min() < 0 or values.max() > 65_535:
        raise unsupported("TIFF with gray values beyond 16 bits")
    scale = np.clip((np.arange(65_536) - stored.black) / (stored.white - stored.black), 0, 1)
    gray = np.rint(scale * 255).astype(np.uint8)[values]
    if "transparency" in image.info:
        gray[values == image.info["transparency"]] = 255
    return np.repeat(gray[:, :, np.newaxis], 3, axis=2)


def _placed(rgb: npt.NDArray[np.uint8], stored: Stored) -> npt.NDArray[np.uint8]:
    """A frame that covers a part of its image only, on white."""
    assert stored.frame is not None, "only called with a frame"
    x, y, width, height = stored.frame
    canvas = np.full((stored.height, stored.width, 3), 255, np.uint8)
    canvas[y : y + height, x : x + width] = rgb
    return canvas

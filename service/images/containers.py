"""Reads image files without decoding pixels: size, orientation, and the bytes that the pixels depend on.

Decoders are written for trusted files, and spend time and memory on everything else in a file: text that
inflates a thousandfold, millions of tiny chunks, further frames. So each reader here reads the container
once, in bounded time, and keeps only the parts that the pixels of the first image depend on. Knows nothing of
limits or pixels. Readers raise any `Exception` for broken data; the caller turns it into one error.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import simplejpeg
from PIL.AvifImagePlugin import AvifImageFile
from PIL.JpegImagePlugin import JpegImageFile

from service.images.avif import decoded_pixels
from service.images.formats import ImageFormat, unsupported
from service.images.jpeg import essential_jpeg, is_plausible, read_jpeg
from service.images.tiff import exif_orientation, read_tiff
from service.images.tiff_fax import are_rows_plausible
from service.images.tiff_jpeg import are_pieces_plausible
from service.images.webp import tables_bytes, webp_chunks

_MAX_CHUNKS = 65_536  # real files have hundreds, rarely thousands
# Pillow reads some chunks of a PNG in Python. A file may have this many, and one more for this many bytes.
_MIN_PNG_CHUNKS, _BYTES_PER_PNG_CHUNK = 4096, 512
_MAX_PREAMBLE_BYTES = 1 << 20  # of a GIF, before its first image

# Bytes per pixel at the peak of decoding, for unusual formats. Measured, except for AVIF of more than 8 bits.
_MANY_SCANS_BYTES = 13  # also the coefficients of a JPEG, 2 for each component
_WEBP_BYTES = 17  # two canvases, and the frame
_AVIF_BYTES = 22  # planes of 16 bits with and without film grain, and the frame
_TIFF_BYTES = 13  # one strip of 16-bit colours and alpha
MAX_BYTES_PER_PIXEL = _AVIF_BYTES

Parts = tuple[bytes | memoryview, ...]


@dataclass(frozen=True)
class Stored:
    """The first image of a file. Sizes in pixels, as stored: before the orientation is applied."""

    width: int
    height: int
    parts: Parts  # joined: a file with the same pixels, for Pillow
    orientation: int = 1  # as in EXIF, 1 to 8
    piece_pixels: int = 1  # of the largest part that is decoded at once; may exceed the image
    black: int = 0  # range of gray values of more than 8 bits
    white: int = 65_535
    frame: tuple[int, int, int, int] | None = None  # x, y, width, height of the pixels, if not all
    is_plain_jpeg: bool = False  # simplejpeg decodes it
    is_plausible: bool = True  # False: it cannot be a whole image, and is not decoded
    bytes_per_pixel: int = 8  # at the peak of decoding: Pillow's image has 4, the RGB array 3
    extra_bytes: int = 0  # at the peak of decoding, whatever the number of pixels


_CHUNK = struct.Struct(">I4s")
_IHDR = struct.Struct(">II5B")
_PNG_KEPT = frozenset({b"IHDR", b"PLTE", b"IDAT", b"IEND"})
_SIZES = struct.Struct("<HHHH")


def _read_jpeg(data: bytes) -> Stored:
    jpeg = read_jpeg(data)
    if jpeg.unserved_kind is not None:
        raise unsupported(jpeg.unserved_kind)
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        is_plain = colorspace in ("YCbCr", "RGB", "Gray")
    except ValueError:  # Pillow may still read it
        with JpegImageFile(io.BytesIO(b"".join(essential_jpeg(data)))) as image:
            width, height = image.size
            is_plain = False
    return Stored(
        width,
        height,
        (data,),
        jpeg.orientation,
        is_plain_jpeg=is_plain,
        is_plausible=is_plausible(data, jpeg, width * height),
        bytes_per_pixel=Stored.bytes_per_pixel if jpeg.has_few_scans else _MANY_SCANS_BYTES,
    )


def _read_png(data: bytes) -> Stored:
    view = memoryview(data)
    length, kind = _CHUNK.unpack_from(data, 8)
    if kind == b"CgBI":
        raise unsupported("an iOS-optimised PNG")
    if kind != b"IHDR" or length != 13:
        raise ValueError("a PNG without a header")
    width, height, depth, color, *_ = _IHDR.unpack_from(data, 16)
    orientation, has_palette = 1, False
    parts: list[bytes | memoryview] = []
    run = at = 8  # adjacent chunks that are kept become one part, because each part takes memory
    for kind, start, end in _png_chunks(data):
        at = end
        if kind in _PNG_KEPT:
            has_palette = has_palette or kind == b"PLTE"
            continue
        if run < start:
            parts.append(view[run:start])
        run = end
        if kind == b"tRNS":
            parts.append(_transparency(data[start:end], depth, color))
        elif kind == b"eXIf":
            orientation = exif_orientation(data[start + 8 : end - 4])
    if color == 3 and not has_palette:
        raise ValueError("a palette image without a palette")
    return Stored(width, height, (view[:8], *parts, view[run:at]), orientation)


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yields (type, start, end) of the chunks. The last chunk may be cut off."""
    at, num_costly = 8, 0
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(data):
            return
        length, kind = _CHUNK.unpack_from(data, at)
        num_costly += kind in _PNG_KEPT or kind == b"tRNS"
        if num_costly > _MIN_PNG_CHUNKS + len(data) // _BYTES_PER_PNG_CHUNK:
            break
        yield kind, at, at + 12 + length
        if kind == b"IEND":
            return
        at += 12 + length
    raise ValueError("too many chunks")


def _transparency(chunk: bytes, depth: int, color: int) -> bytes:
    """The tRNS chunk. Its transparent value is scaled to 8 bits wherever Pillow scales the pixels."""
    if color == 0 and depth in (2, 4):
        values = [struct.unpack_from(">H", chunk, 8)[0] * 255 // (2**depth - 1) & 0xFFFF]
    elif color == 2 and depth == 16:
        values = [value >> 8 for value in struct.unpack_from(">3H", chunk, 8)]
    else:
        return chunk
    body = b"tRNS" + struct.pack(f">{len(values)}H", *values)
    return struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))


def _read_gif(data: bytes) -> Stored:
    screen_width, screen_height, flags = struct.unpack_from("<HHB", data, 6)
    palette_end = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    at, control = _find_gif_frame(data, palette_end)
    x, y, width, height = _SIZES.unpack_from(data, at + 1)
    if not width or not height:
        raise ValueError("an empty frame")
    view = memoryview(data)
    parts = (
        b"GIF89a" + struct.pack("<HH", width, height),
        view[10:palette_end],
        control,
        b"," + _SIZES.pack(0, 0, width, height),
        view[at + 9 :],
    )
    full = max(screen_width, x + width), max(screen_height, y + height)
    return Stored(*full, parts, frame=None if full == (width, height) else (x, y, width, height))


def _find_gif_frame(data: bytes, at: int) -> tuple[int, bytes]:
    """The position of the first frame, and its control extension reduced to the transparent index."""
    limit = at + _MAX_PREAMBLE_BYTES
    control = b""
    while at < limit:
        if data[at] == 0x2C:
            return at, control
        if data[at] != 0x21:
            raise ValueError("not a GIF block")
        if data[at + 1] == 0xF9:
            control = b"!\xf9\4" + bytes((data[at + 3] & 1, 0, 0, data[at + 6], 0))
        at += 2
        while data[at] and at < limit:
            at += data[at] + 1
        at += 1
    raise ValueError("no frame at the start of the GIF")


def _read_webp(data: bytes) -> Stored:
    kind = data[12:16]
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
    elif kind == b"VP8L" and data[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 " and data[23:26] == b"\x9d\1\x2a":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    else:
        raise ValueError("not a WebP image")
    exif = next((bytes(body) for kind, body in webp_chunks(data) if kind == b"EXIF"), b"")
    return Stored(
        width,
        height,
        (data,),
        exif_orientation(exif),
        bytes_per_pixel=_WEBP_BYTES,
        extra_bytes=tables_bytes(data, width, height),
    )


# An EXIF item in the item list of an ISO media file; its number has 16 bits in version 2, 32 in version 3.
_EXIF_ITEM = re.compile(rb"(infe(?:\x02.{7}|\x03.{9}))Exif", re.DOTALL)


def _read_avif(data: bytes) -> Stored:
    """Hides the EXIF data from Pillow, because an AVIF has its orientation in properties of its own."""
    renamed = _EXIF_ITEM.sub(rb"\1none", data, count=8)
    with AvifImageFile(io.BytesIO(renamed)) as image:
        orientation = exif_orientation(image.info.get("exif", b""))
        width, height = image.size
    return Stored(
        width,
        height,
        (renamed,),
        orientation,
        piece_pixels=decoded_pixels(data),
        bytes_per_pixel=_AVIF_BYTES,
    )


def _read_bmp(data: bytes) -> Stored:
    (header_bytes,) = struct.unpack_from("<I", data, 14)
    width, height = struct.unpack_from("<HH" if header_bytes == 12 else "<ii", data, 18)
    return Stored(width, abs(height), (data,))  # a negative height means rows from the top


def _read_tiff(data: bytes) -> Stored:
    tiff = read_tiff(data)
    white = 4095 if tiff.bits == 12 else 65_535
    black, white = (white, 0) if tiff.white_is_zero else (0, white)
    jpeg_bytes = 3 * min(tiff.samples, 6) + 1 if tiff.jpegs else 0  # coefficients of many scans, and a strip
    return Stored(
        tiff.width,
        tiff.height,
        tiff.parts,
        tiff.orientation,
        tiff.piece_pixels,
        black,
        white,
        is_plausible=are_rows_plausible(tiff) and are_pieces_plausible(data, tiff),
        bytes_per_pixel=max(_TIFF_BYTES, jpeg_bytes),
    )


READERS: Mapping[ImageFormat, Callable[[bytes], Stored]] = {
    "JPEG": _read_jpeg,
    "PNG": _read_png,
    "GIF": _read_gif,
    "WEBP": _read_webp,
    "AVIF": _read_avif,
    "BMP": _read_bmp,
    "TIFF": _read_tiff,
}

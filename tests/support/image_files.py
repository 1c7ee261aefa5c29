"""Image files for tests: saved by Pillow, or written by hand if Pillow cannot write them."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image


def save(image: Image.Image, format_: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format_, **options)
    return file.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def tiff(
    width: int, height: int, pixels: bytes, tags: Mapping[int, tuple[int, ...]], order: str = "<"
) -> bytes:
    """An uncompressed TIFF written by hand: all tags as 32-bit integers. A tag without values is left out."""
    mark = b"II*\0" if order == "<" else b"MM\0*"
    every: dict[int, tuple[int, ...]] = {
        256: (width,),
        257: (height,),
        273: (8,),
        279: (len(pixels),),
        **tags,
    }
    every = {tag: values for tag, values in every.items() if values}
    start = 8 + len(pixels)
    after = start + 2 + 12 * len(every) + 4
    entries, outside = b"", b""
    for tag, values in sorted(every.items()):
        body = struct.pack(f"{order}{len(values)}I", *values)
        if len(values) > 1:
            outside, body = outside + body, struct.pack(order + "I", after + len(outside))
        entries += struct.pack(order + "HHI", tag, 4, len(values)) + body
    directory = struct.pack(order + "H", len(every)) + entries + bytes(4)
    return mark + struct.pack(order + "I", start) + pixels + directory + outside


def small_tiff(tags: Mapping[int, tuple[int, int, bytes]], data: bytes = b"") -> bytes:
    """A TIFF of 16 × 16 gray pixels; tags map to (type, count, value or offset); `data` is at 264."""
    every = {
        256: (3, 1, b"\x10\0\0\0"),
        257: (3, 1, b"\x10\0\0\0"),
        258: (3, 1, b"\x08\0\0\0"),
        262: (3, 1, b"\1\0\0\0"),
        273: (4, 1, struct.pack("<I", 8)),
        279: (4, 1, struct.pack("<I", 256)),
        **tags,
    }
    entries = b"".join(struct.pack("<HHI4s", tag, *every[tag]) for tag in sorted(every))
    directory = struct.pack("<H", len(every)) + entries + bytes(4)
    start = 264 + len(data)
    return b"II*\0" + struct.pack("<I", start) + bytes(256) + data + directory


@dataclass(frozen=True)
class TiffLayout:
    """The order, the encoding and the meaning of the samples of a TIFF."""

    bits: int  # per sample
    photometric: int
    extra: tuple[int, ...] = ()  # the meaning of extra samples: 0 unspecified, 1 premultiplied alpha, 2 alpha
    is_planar: bool = False
    compression: int = 1  # none; 5 is LZW, 8 Deflate, 32773 PackBits
    order: str = "<"
    rows_per_strip: int = 1 << 16
    tile: int = 0  # side of a tile; 0: strips
    has_predictor: bool = False  # horizontal differencing
    sample_format: int = 1  # 1 unsigned, 2 signed
    fill_order: int = 1  # 2: the lowest bit of a byte comes first


def tiff_of(samples: npt.NDArray[Any], layout: TiffLayout) -> bytes:
    """A TIFF of an array [height, width, samples] of whole numbers, written without any image library."""
    height, width, num_samples = samples.shape
    samples = samples.astype(np.uint32)
    planes = [samples[..., [index]] for index in range(num_samples)] if layout.is_planar else [samples]
    pieces = [_compressed(piece, layout) for plane in planes for piece in _pieces(plane, layout)]
    if layout.fill_order == 2:
        pieces = [_reversed_bits(piece) for piece in pieces]
    offsets = np.cumsum([8, *map(len, pieces)])[:-1]
    places, sizes = (324, 325) if layout.tile else (273, 279)
    tags: dict[int, tuple[int, ...]] = {
        258: (layout.bits,) * num_samples,
        259: (layout.compression,),
        262: (layout.photometric,),
        277: (num_samples,),
        284: (2 if layout.is_planar else 1,),
        317: (2 if layout.has_predictor else 1,),
        339: (layout.sample_format,) * num_samples,
        266: (layout.fill_order,),
        338: layout.extra,
        273: (),
        279: (),
        places: tuple(map(int, offsets)),
        sizes: tuple(map(len, pieces)),
    }
    tags |= {322: (layout.tile,), 323: (layout.tile,)} if layout.tile else {278: (layout.rows_per_strip,)}
    if layout.photometric == 6:
        tags[530] = (1, 1)  # no subsampling
    if layout.photometric == 3:
        shades = range(0, 1 << 16, (1 << 16) >> layout.bits)
        tags[320] = (*shades, *reversed(shades), *shades)
    return tiff(width, height, b"".join(pieces), tags, layout.order)


def _pieces(plane: npt.NDArray[Any], layout: TiffLayout) -> Iterator[npt.NDArray[Any]]:
    """The strips or tiles of an array [height, width, samples]; tiles at the edges are filled up."""
    height, width, _ = plane.shape
    if not layout.tile:
        for top in range(0, height, layout.rows_per_strip):
            yield plane[top : top + layout.rows_per_strip]
        return
    side = layout.tile
    filled = np.pad(plane, ((0, -height % side), (0, -width % side), (0, 0)))
    for top in range(0, height, side):
        for left in range(0, width, side):
            yield filled[top : top + side, left : left + side]


def _compressed(piece: npt.NDArray[Any], layout: TiffLayout) -> bytes:
    if layout.has_predictor:
        piece = np.diff(piece, axis=1, prepend=piece[:, :1] * 0)
    if layout.bits in (8, 16, 32):
        body = piece.astype(f"{layout.order}u{layout.bits // 8}").tobytes()
    else:
        shifts = np.arange(layout.bits)[::-1]
        rows = (piece[..., np.newaxis] >> shifts & 1).astype(np.uint8).reshape(len(piece), -1)
        body = np.packbits(rows, axis=1).tobytes()
    if layout.compression == 5:
        return _lzw(body)
    if layout.compression == 32773:
        return b"".join(b"\0" + body[at : at + 1] for at in range(len(body)))
    return zlib.compress(body) if layout.compression == 8 else body


def _reversed_bits(data: bytes) -> bytes:
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    return np.packbits(bits, bitorder="big").tobytes()


def _lzw(body: bytes) -> bytes:
    """Codes of 9 bits for single bytes, with a code that clears the table before it needs longer ones."""
    codes = []
    for index, byte in enumerate(body):
        codes += [256, byte] if index % 200 == 0 else [byte]
    bits = np.array([*codes, 257])[:, np.newaxis] >> np.arange(9)[::-1] & 1
    return np.packbits(bits.astype(np.uint8)).tobytes()

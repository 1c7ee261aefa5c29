"""Image files for tests: saved by Pillow, or written by hand where Pillow would not write them."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Mapping
from typing import Any

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
    """An uncompressed TIFF written by hand: all tags as 32-bit integers, orientation and sizes among them."""
    mark = b"II*\0" if order == "<" else b"MM\0*"
    every: dict[int, tuple[int, ...]] = {
        256: (width,),
        257: (height,),
        273: (8,),
        279: (len(pixels),),
        **tags,
    }
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

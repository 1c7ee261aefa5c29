"""Lossless WebP files with a group of Huffman codes for every 4 × 4 pixels. No encoder writes such files."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np
from PIL import Image

from tests.support.image_files import save

_SIMPLE = (1, 0, 0, 0)  # one symbol, 0, which then takes no bits
SHORT_CODES = _SIMPLE * 5
_CACHE_BITS = 11  # adds 2048 symbols to the first code of a group


def _bits(*fields: tuple[int, int]) -> list[int]:
    """The bits of each (value, number of bits), the lowest bit first."""
    return [value >> bit & 1 for value, num_bits in fields for bit in range(num_bits)]


def _one_length(length: int, num_symbols: int) -> list[int]:
    """A code whose first `num_symbols` symbols all have the same length, above 5."""
    lengths = [int(other == length) for other in (17, 18, 0, 1, 2, 3, 4, 5, 16, *range(6, length + 1))]
    said = [(0, 1), (len(lengths) - 4, 4), *((present, 3) for present in lengths)]
    return _bits(*said, (1, 1), (5, 3), (num_symbols - 2, 12))


LONG_CODES = (*_one_length(11, 2048), *_SIMPLE * 4)


def vp8l(width: int, height: int, group: Iterable[int], bits_per_pixel: int = 0) -> bytes:
    """The body of the chunk: an image of zeros, each of which takes `bits_per_pixel` bits."""
    num_groups = -(-width // 4) * -(-height // 4)
    assert num_groups <= 65_536
    header = _bits((0x2F, 8), (width - 1, 14), (height - 1, 14), (1, 1), (0, 3), (0, 1))
    cache_and_groups = _bits((1, 1), (_CACHE_BITS, 4), (1, 1), (0, 3))
    image_of_groups = _bits((0, 1)) + _one_length(8, 256) * 2 + list(_SIMPLE) * 3
    numbers = np.arange(num_groups, dtype=np.uint16)
    codes = np.unpackbits(np.stack([numbers & 255, numbers >> 8], 1).astype(np.uint8), axis=1)
    groups = np.tile(np.array(list(group), np.uint8), num_groups)
    ends = np.zeros(64 + width * height * bits_per_pixel, np.uint8)
    parts = [np.array(header + cache_and_groups + image_of_groups, np.uint8), codes.ravel(), groups, ends]
    return np.packbits(np.concatenate(parts), bitorder="little").tobytes()


def chunk(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("<I", len(body)) + body + bytes(len(body) & 1)


def riff(*chunks: bytes) -> bytes:
    return chunk(b"RIFF", b"WEBP" + b"".join(chunks))


def vp8x(flags: int, width: int, height: int) -> bytes:
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return chunk(b"VP8X", struct.pack("<I", flags) + sides)


def frame(width: int, height: int, *chunks: bytes) -> bytes:
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return chunk(b"ANMF", bytes(6) + sides + bytes(4) + b"".join(chunks))


def many_tables(how: str, side: int) -> bytes:
    """Lossless data with the most groups for `side`: plain, in a frame, or as alpha with long codes."""
    if how == "plain":
        return riff(chunk(b"VP8L", vp8l(side, side, SHORT_CODES)))
    if how == "frame":
        lossless = chunk(b"VP8L", vp8l(side, side, SHORT_CODES))
        return riff(vp8x(18, side, side), chunk(b"ANIM", bytes(6)), frame(side, side, lossless))
    lossy = save(Image.new("RGB", (side, side)), "WEBP")
    alpha = b"\1" + vp8l(side, side, LONG_CODES, bits_per_pixel=11)[5:]
    return riff(vp8x(16, side, side), chunk(b"ALPH", alpha), lossy[12:])

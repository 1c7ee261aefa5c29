"""Lossless WebP: its chunks, and the memory for its code tables during decoding.

A lossless image, and the alpha channel of a lossy image, may have a separate group of five Huffman codes for
every 4 × 4 pixels. A group takes 20 bits in the file and thousands of bytes in memory. The number of groups
is stored behind other compressed data, so only bounds are known. Knows nothing of pixels or limits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_MAX_CHUNKS = 65_536  # real files have a few, and a few for each frame
_CHUNK = struct.Struct("<4sI")
_FRAME_HEADER_BYTES = 16  # of an animation; the frame's own chunks follow
_LOSSLESS = frozenset({b"VP8L", b"ALPH"})

# In libwebp a table has 256 entries of 4 bytes, and more for codes longer than 8 bits. The five tables of a
# group have at most 5004 entries, and its other fields take 568 bytes. Measured: 5.6 KB with the shortest
# codes that can be stored, 13.8 KB if all codes of one table have 11 bits.
_GROUP_BYTES = 4 * 5004 + 568
_MAX_GROUPS = 65_536
_MAX_UNUSED_GROUPS = 1000  # libwebp makes at most this many groups that no pixel refers to

# The shortest code takes 4 bits, the shortest with codes of over 8 bits takes 45. So five of the shortest
# codes expand most.
_TABLES_BYTES_PER_BYTE = (5 * 4 * 256 + 568) * 8 // 20


def webp_chunks(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Yields (kind, body) of each chunk. The chunks in a frame of an animation follow it.

    Raises `ValueError` if there are too many.
    """
    view = memoryview(data)
    at = 12
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(data):
            return
        kind, length = _CHUNK.unpack_from(data, at)
        yield kind, view[at + 8 : at + 8 + length]
        if at == 12 and kind != b"VP8X":
            return
        at += 8 + (_FRAME_HEADER_BYTES if kind == b"ANMF" else length + (length & 1))
    raise ValueError("too many chunks")


def tables_bytes(data: bytes, width: int, height: int) -> int:
    """The most memory that the code tables of one image of the file take."""
    num_bytes = max((len(body) for kind, body in webp_chunks(data) if kind in _LOSSLESS), default=0)
    num_groups = max(_MAX_UNUSED_GROUPS, -(-width // 4) * -(-height // 4))
    return min(num_bytes * _TABLES_BYTES_PER_BYTE, min(num_groups, _MAX_GROUPS) * _GROUP_BYTES)

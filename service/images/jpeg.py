"""The segments of a JPEG, and whether so many pixels and scans may be in so few bytes.

Knows nothing of limits, of pixels or of the files that a JPEG may be a part of. Readers raise any
`Exception` for broken data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from service.images.tiff import exif_orientation

_MAX_SEGMENTS = 65_536  # real files have hundreds, rarely thousands
_MAX_SCANS = 1024  # real files have about 10, and each costs a pass over all pixels
_MAX_SCANNED_PIXELS = 1 << 29
_MAX_PIXELS_PER_BYTE = 512  # where Huffman-coded: at least a bit for each block of 8 × 8

# An FF followed by anything but FF (padding) and 00 (an FF among the compressed data).
_MARKER = re.compile(rb"\xff([\x01-\xfe])", re.DOTALL)
_SOS, _EOI, _APP1 = 0xDA, 0xD9, 0xE1
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD9)})
_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE_SOF = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
_HUFFMAN_SOF = frozenset({0xC0, 0xC1, 0xC2})
_KEPT = frozenset({*range(0xC0, 0xD0), 0xDB, 0xDD, 0xE0, 0xEE})  # frames, tables, restarts, JFIF, Adobe


@dataclass(frozen=True)
class JpegHeader:
    """What stands before the first scan. Sizes in pixels as stored; 0 without a frame."""

    width: int
    height: int
    orientation: int  # as in EXIF, 1 to 8
    has_few_scans: bool
    is_huffman: bool
    num_segments: int


def read_jpeg(data: bytes) -> JpegHeader:
    width, height, num_components, num_segments = 0, 0, 0, 0
    orientation, has_few_scans, is_huffman = 1, True, False
    for marker, start, end in _segments(data):
        num_segments += 1
        if marker == _APP1 and data.startswith(b"Exif\0\0", start + 4):
            orientation = exif_orientation(data[start + 4 : end])
        elif marker in _SOF:
            has_few_scans, is_huffman = marker not in _PROGRESSIVE_SOF, marker in _HUFFMAN_SOF
            height, width = data[start + 5] << 8 | data[start + 6], data[start + 7] << 8 | data[start + 8]
            num_components = data[start + 9]
        elif marker == _SOS:
            # A first scan without all of the components may be the first of any number.
            has_few_scans = has_few_scans and data[start + 4] >= num_components
    return JpegHeader(width, height, orientation, has_few_scans, is_huffman, num_segments)


def is_plausible(data: bytes, header: JpegHeader, num_pixels: int) -> bool:
    """Whether the data are enough for the pixels, and the scans not too many to be decoded."""
    if header.is_huffman and num_pixels > len(data) * _MAX_PIXELS_PER_BYTE:
        return False
    return header.has_few_scans or data.count(b"\xff\xda") <= _max_scans(num_pixels)


def _max_scans(num_pixels: int) -> int:
    return min(_MAX_SCANS, max(16, _MAX_SCANNED_PIXELS // max(1, num_pixels)))


def essential_jpeg(data: bytes) -> tuple[bytes | memoryview, ...]:
    """The segments that the pixels depend on, and everything from the first scan on."""
    view = memoryview(data)
    parts: list[bytes | memoryview] = [view[:2]]
    for marker, start, end in _segments(data):
        if marker in _KEPT:
            parts.append(view[start:end])
        elif marker == _SOS:
            parts.append(view[start:])
    return tuple(parts)


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(marker, start, end) of the segments up to the first scan; `start` is where the marker stands."""
    at = 2
    for _ in range(_MAX_SEGMENTS):
        start, marker = at, data[at + 1]
        if data[at] != 0xFF or not 0 < marker < 0xFF:  # something between two segments
            found = _MARKER.search(data, at)
            if found is None:
                break
            start, marker = found.start(), data[found.start(1)]
        at = start + 2
        if marker in _WITHOUT_LENGTH:
            continue
        if marker != _EOI:
            at += data[at] << 8 | data[at + 1]
        yield marker, start, at
        if marker in (_SOS, _EOI):
            return
    raise ValueError("a JPEG without a scan")

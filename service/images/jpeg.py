"""The segments of a JPEG: its kind, what pixels depend on, and whether the scans are plausible and complete.

Knows nothing of limits, of pixels or of the files that a JPEG may be a part of. Readers raise any
`Exception` for broken data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from service.images.tiff import exif_orientation

END = b"\xff\xd9"

_MAX_SEGMENTS = 65_536  # real files have hundreds, rarely thousands
_MAX_SCANS = 1024  # real files have about 10, and each costs a pass over all pixels
_MAX_SCANNED_PIXELS = 1 << 29
_MAX_PIXELS_PER_BYTE = 512  # where Huffman-coded: at least a bit for each block of 8 × 8

# An FF followed by anything but FF (padding) and 00 (an FF among the compressed data).
_MARKER = re.compile(rb"\xff([\x01-\xfe])", re.DOTALL)
_MARKER_BETWEEN_SCANS = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]", re.DOTALL)  # nor restarts within a scan
_SOS, _EOI, _APP1, _DHP = 0xDA, 0xD9, 0xE1, 0xDE
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD9)})
_JPEG_LS_SOF = 0xF7
_SOF = frozenset({*range(0xC0, 0xD0), _JPEG_LS_SOF}) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE_SOF = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
_HUFFMAN_SOF = frozenset({0xC0, 0xC1, 0xC2})
_LOSSLESS_SOF, _ARITHMETIC_LOSSLESS_SOF = 0xC3, 0xCB
_HIERARCHICAL = frozenset({_DHP, 0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF})
_KEPT = frozenset({*range(0xC0, 0xD0), 0xDB, 0xDD, 0xE0, 0xEE})  # frames, tables, restarts, JFIF, Adobe

_NUM_COEFFICIENTS = 64  # of a block


@dataclass(frozen=True)
class JpegHeader:
    """What stands before the first scan. Sizes in pixels as stored; 0 without a frame."""

    width: int
    height: int
    orientation: int  # as in EXIF, 1 to 8
    components: bytes  # their identifiers, one byte each
    has_few_scans: bool
    is_progressive: bool
    is_huffman: bool
    num_segments: int
    unserved_kind: str | None  # the name of a kind that is not decoded


def read_jpeg(data: bytes) -> JpegHeader:
    width, height, components, num_segments, sof = 0, 0, b"", 0, 0
    orientation, has_few_scans, unserved_kind = 1, True, None
    for marker, start, end in _segments(data):
        num_segments += 1
        if marker == _APP1 and data.startswith(b"Exif\0\0", start + 4):
            orientation = exif_orientation(data[start + 4 : end])
        elif marker in _SOF:
            sof, has_few_scans = marker, marker not in _PROGRESSIVE_SOF
            height, width = data[start + 5] << 8 | data[start + 6], data[start + 7] << 8 | data[start + 8]
            components = data[start + 10 : start + 10 + 3 * data[start + 9] : 3]
            unserved_kind = unserved_kind or _unserved_kind(marker, bits=data[start + 4])
        elif marker == _DHP:
            unserved_kind = _unserved_kind(marker, bits=8)
        elif marker == _SOS:
            # A first scan without all of the components may be the first of any number.
            has_few_scans = has_few_scans and data[start + 4] >= len(components)
    return JpegHeader(
        width,
        height,
        orientation,
        components,
        has_few_scans,
        is_progressive=sof in _PROGRESSIVE_SOF,
        is_huffman=sof in _HUFFMAN_SOF,
        num_segments=num_segments,
        unserved_kind=unserved_kind,
    )


def _unserved_kind(marker: int, bits: int) -> str | None:
    if marker == _JPEG_LS_SOF:
        return "JPEG-LS"
    if marker in _HIERARCHICAL:
        return "hierarchical JPEG"
    if marker == _ARITHMETIC_LOSSLESS_SOF or (marker == _LOSSLESS_SOF and bits != 8):
        return f"lossless JPEG of {bits} bits"
    return "JPEG of 12 bits" if bits == 12 else None


def is_plausible(data: bytes, header: JpegHeader, num_pixels: int) -> bool:
    """Whether the data are enough for the pixels, and the scans not too many to be decoded."""
    if header.is_huffman and num_pixels > len(data) * _MAX_PIXELS_PER_BYTE:
        return False
    return header.has_few_scans or data.count(b"\xff\xda") <= _max_scans(num_pixels)


def has_end(data: bytes) -> bool:
    """Whether an end marker follows the first scan. A truncated file has none, as a rule."""
    return data.find(END, _first_scan(data)) >= 0


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


def is_only_end_missing(data: bytes) -> bool:
    """Whether the end marker is missing, but no scan. Only decoding tells whether the last scan is whole.

    False for arithmetic coding, where a decoder takes zeros for missing data, without an error.
    """
    header = read_jpeg(data)
    if not header.is_huffman:
        return False
    # How many bits of each coefficient are still to come.
    missing = {component: bytearray(b"\xff" * _NUM_COEFFICIENTS) for component in header.components}
    for start in _scans_without_end(data):
        parameters = start + 5 + 2 * data[start + 4]
        first, last, num_bits = data[parameters], data[parameters + 1], data[parameters + 2] & 15
        if not header.is_progressive:
            first, last, num_bits = 0, _NUM_COEFFICIENTS - 1, 0
        for component in data[start + 5 : parameters : 2]:
            missing[component][first : last + 1] = bytes((num_bits,)) * (last - first + 1)
    return not any(map(any, missing.values()))


def _scans_without_end(data: bytes) -> list[int]:
    """Where each scan starts; nothing if there is an end marker, or too much to read."""
    found: list[int] = []
    at = _first_scan(data)
    for _ in range(_MAX_SEGMENTS):
        marker = data[at + 1]
        if marker == _EOI:
            return []
        if marker == _SOS:
            found.append(at)
        if marker not in _WITHOUT_LENGTH:
            at += data[at + 2] << 8 | data[at + 3]
        following = _MARKER_BETWEEN_SCANS.search(data, at + 2)
        if following is None:
            return found
        at = following.start()
    return []


def _first_scan(data: bytes) -> int:
    """Where the first scan starts."""
    return next(start for marker, start, _ in _segments(data) if marker == _SOS)


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

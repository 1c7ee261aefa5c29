"""Image file directories: the orientation in EXIF data, and TIFF files reduced to what pixels depend on.

A TIFF may have any number of tags of any size, and decoders read more tags than the pixels depend on. So the
decoder gets a new directory, with few tags of checked sizes, for the same data. Source of tags and layouts:
TIFF 6.0 and the BigTIFF proposal. Knows nothing of pixels or limits.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from service.images.formats import unsupported
from service.images.tiff_layouts import (
    DEFLATE,
    GROUP_3,
    GROUP_4,
    JPEG,
    LZW,
    NONE,
    OLD_DEFLATE,
    PACKBITS,
    RLE,
    ZSTD,
    TiffLayout,
    untrusted_layout,
)

# Tag numbers.
_SUBFILE_TYPE, _WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 254, 256, 257, 258, 259, 262
_FILL_ORDER, _STRIP_OFFSETS, _ORIENTATION, _SAMPLES, _STRIP_ROWS, _STRIP_BYTES = 266, 273, 274, 277, 278, 279
_PLANES, _PREDICTOR, _COLOR_MAP = 284, 317, 320
_TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_BYTES, _SUB_DIRECTORIES = 322, 323, 324, 325, 330
_EXTRA_SAMPLES, _SAMPLE_FORMAT, _JPEG_TABLES, _SUBSAMPLING, _DNG_VERSION = 338, 339, 347, 530, 50706

# Tags that pixels depend on, and the largest number of values of each.
_MAX_PIECES = 65_536  # strips or tiles; even a small one takes a decoder some microseconds
_KEPT: dict[int, int] = {
    _WIDTH: 1,
    _HEIGHT: 1,
    _BITS: 16,
    _COMPRESSION: 1,
    _PHOTOMETRIC: 1,
    _FILL_ORDER: 1,
    _STRIP_OFFSETS: _MAX_PIECES,
    _SAMPLES: 1,
    _STRIP_ROWS: 1,
    _STRIP_BYTES: _MAX_PIECES,
    _PLANES: 1,
    292: 1,  # options of fax compression
    293: 1,
    _PREDICTOR: 1,
    _COLOR_MAP: 3 * 256,
    _TILE_WIDTH: 1,
    _TILE_HEIGHT: 1,
    _TILE_OFFSETS: _MAX_PIECES,
    _TILE_BYTES: _MAX_PIECES,
    _EXTRA_SAMPLES: 16,
    _SAMPLE_FORMAT: 16,
    _JPEG_TABLES: 65_536,
    529: 3,  # YCbCr: coefficients, subsampling, positioning, reference black and white
    _SUBSAMPLING: 2,
    531: 1,
    532: 6,
}

# Left out: old-style JPEG, and compressions that few programs write.
_COMPRESSIONS = {NONE, RLE, GROUP_3, GROUP_4, LZW, JPEG, DEFLATE, PACKBITS, OLD_DEFLATE, ZSTD}

_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 16: 8}
_INTEGERS = {1: "B", 3: "H", 4: "I", 16: "Q"}


@dataclass(frozen=True)
class Layout:
    """How numbers are written in a file."""

    order: str  # "<" or ">"
    is_big: bool  # BigTIFF, with numbers of 64 bits

    @property
    def entry(self) -> struct.Struct:
        """Tag, type, number of values, and the values or their offset."""
        return struct.Struct(self.order + ("HHQ8s" if self.is_big else "HHI4s"))

    @property
    def offset(self) -> struct.Struct:
        return struct.Struct(self.order + ("Q" if self.is_big else "I"))

    @property
    def count(self) -> struct.Struct:
        return struct.Struct(self.order + ("Q" if self.is_big else "H"))


@dataclass(frozen=True)
class Entry:
    tag: int
    type: int
    count: int
    value: bytes

    @property
    def num_bytes(self) -> int:
        return self.count * _TYPE_BYTES.get(self.type, 0)

    def integer(self, order: str, default: int) -> int:
        """The first value, if the values are integers in the entry itself; else `default`."""
        code = _INTEGERS.get(self.type)
        if code is None or not self.count or self.num_bytes > len(self.value):
            return default
        number: int = struct.unpack_from(order + code, self.value)[0]
        return number

    def integers(self, data: bytes, layout: Layout) -> tuple[int, ...]:
        """All values, in the entry or outside it. Raises `LookupError` if they are not integers."""
        body, at = self.value, 0
        if self.num_bytes > len(body):
            body, at = data, layout.offset.unpack(self.value)[0]
        return struct.unpack_from(f"{layout.order}{self.count}{_INTEGERS[self.type]}", body, at)


@dataclass(frozen=True)
class JpegPieces:
    """The strips or tiles of a TIFF of JPEGs."""

    max_width: int
    max_height: int
    places: frozenset[tuple[int, int]]  # offset, number of bytes


@dataclass(frozen=True)
class TiffHeader:
    """The first image of a TIFF file."""

    width: int  # as stored
    height: int
    orientation: int
    piece_pixels: int  # pixels of one tile; never less than 1
    samples: int  # per pixel
    bits: int  # per sample, of the first sample
    white_is_zero: bool
    compression: int
    num_data_bytes: int  # of all strips or tiles
    parts: tuple[bytes | memoryview, ...]  # joined: the file with its new directory
    jpegs: JpegPieces | None


def exif_orientation(exif: bytes) -> int:
    """The orientation, 1 to 8, in EXIF data with or without their prefix; 1 if there is none."""
    start = 6 if exif.startswith(b"Exif\0\0") else 0
    order = {b"II": "<", b"MM": ">"}.get(exif[start : start + 2])
    if order is None or len(exif) < start + 10:
        return 1
    at = start + int(struct.unpack_from(order + "I", exif, start + 4)[0])
    if at + 2 > len(exif):
        return 1
    end = at + 2 + 12 * int(struct.unpack_from(order + "H", exif, at)[0])
    num_bytes = (min(end, len(exif)) - at - 2) // 12 * 12
    for tag, type_, count, value in struct.iter_unpack(order + "HHI4s", exif[at + 2 : at + 2 + num_bytes]):
        if tag == _ORIENTATION:
            return _valid_orientation(Entry(tag, type_, count, value).integer(order, 1))
    return 1


def _valid_orientation(number: int) -> int:
    return number if 1 <= number <= 8 else 1


def read_tiff(data: bytes) -> TiffHeader:
    """Reads the first directory. Raises `ValueError`, `LookupError` or `struct.error` if it is broken, and
    `UnsupportedMedia` if the kind of file is not served."""
    layout = Layout("<" if data[:2] == b"II" else ">", is_big=b"+" in data[2:4])
    entries = _read_entries(data, layout)
    scalar = partial(_scalar, entries, layout)
    is_preview = scalar(_SUBFILE_TYPE, 0) & 1 and _SUB_DIRECTORIES in entries
    if _DNG_VERSION in entries or is_preview:
        raise unsupported("a camera raw file")
    compression = scalar(_COMPRESSION, 1)
    if compression not in _COMPRESSIONS:
        raise unsupported(f"TIFF with compression {compression}")
    kept = [entry for tag, entry in sorted(entries.items()) if tag in _KEPT]
    for entry in kept:
        _check(entry, data, layout)
    samples = _sample_layout(data, layout, entries)
    name = untrusted_layout(samples)
    if name is not None:
        raise unsupported(name)
    if samples.num_samples == 1:  # a single plane, which Pillow decodes wrongly if the tag is there
        kept = [entry for entry in kept if entry.tag != _PLANES]
    tile_pixels = scalar(_TILE_WIDTH, 1) * scalar(_TILE_HEIGHT, 1)
    return TiffHeader(
        width=scalar(_WIDTH, 0),
        height=scalar(_HEIGHT, 0),
        orientation=_valid_orientation(scalar(_ORIENTATION, 1)),
        piece_pixels=max(1, tile_pixels),
        samples=samples.num_samples,
        bits=samples.bits,
        white_is_zero=samples.photometric == 0,
        compression=compression,
        num_data_bytes=_num_data_bytes(data, layout, entries),
        parts=_rewritten(data, layout, kept),
        jpegs=_jpeg_pieces(data, layout, entries) if compression == JPEG else None,
    )


def _sample_layout(data: bytes, layout: Layout, entries: Mapping[int, Entry]) -> TiffLayout:
    """Raises `LookupError` for values that are not integers."""

    def numbers(tag: int, *default: int) -> tuple[int, ...]:
        return entries[tag].integers(data, layout) if tag in entries else default

    scalar = partial(_scalar, entries, layout)
    return TiffLayout(
        bits=numbers(_BITS, 1)[0],
        num_samples=scalar(_SAMPLES, 1),
        photometric=scalar(_PHOTOMETRIC, 0),
        extra=numbers(_EXTRA_SAMPLES),
        compression=scalar(_COMPRESSION, 1),
        is_big_endian=layout.order == ">",
        is_planar=scalar(_PLANES, 1) == 2,
        sample_format=numbers(_SAMPLE_FORMAT, 1)[0],
        fill_order=scalar(_FILL_ORDER, 1),
        predictor=scalar(_PREDICTOR, 1),
        subsampling=numbers(_SUBSAMPLING, 2, 2),
    )


def _num_data_bytes(data: bytes, layout: Layout, entries: Mapping[int, Entry]) -> int:
    """The size of all strips or tiles; without their sizes, the size of the file."""
    sizes = entries.get(_TILE_BYTES) or entries.get(_STRIP_BYTES)
    return sum(min(size, len(data)) for size in sizes.integers(data, layout)) if sizes else len(data)


def _scalar(entries: Mapping[int, Entry], layout: Layout, tag: int, default: int) -> int:
    return entries[tag].integer(layout.order, default) if tag in entries else default


def _jpeg_pieces(data: bytes, layout: Layout, entries: dict[int, Entry]) -> JpegPieces:
    """Raises `ValueError` or `LookupError` if a decoder might take other bytes for a piece."""
    scalar = partial(_scalar, entries, layout)
    is_tiled = _TILE_OFFSETS in entries or _TILE_BYTES in entries
    if is_tiled and (_STRIP_OFFSETS in entries or _STRIP_BYTES in entries):
        raise ValueError("both strips and tiles")
    offsets = entries[_TILE_OFFSETS if is_tiled else _STRIP_OFFSETS].integers(data, layout)
    sizes = entries[_TILE_BYTES if is_tiled else _STRIP_BYTES].integers(data, layout)
    width, height = scalar(_TILE_WIDTH, 0), scalar(_TILE_HEIGHT, 0)
    if not (_TILE_WIDTH in entries or _TILE_HEIGHT in entries):
        width, height = scalar(_WIDTH, 0), scalar(_HEIGHT, 0)
        height = min(height, scalar(_STRIP_ROWS, 0) or height)
    return JpegPieces(width, height, frozenset(zip(offsets, sizes, strict=True)))


def _read_entries(data: bytes, layout: Layout) -> dict[int, Entry]:
    (at,) = layout.offset.unpack_from(data, 8 if layout.is_big else 4)
    (num_entries,) = layout.count.unpack_from(data, at)
    if num_entries > 65_535:
        raise ValueError("too many tags")
    first, size = at + layout.count.size, layout.entry.size
    table = data[first : first + num_entries * size]
    if len(table) < num_entries * size:
        raise ValueError("the directory is truncated")
    entries: dict[int, Entry] = {}
    for fields in layout.entry.iter_unpack(table):
        entries.setdefault(fields[0], Entry(*fields))
    return entries


def _check(entry: Entry, data: bytes, layout: Layout) -> None:
    if entry.type not in _TYPE_BYTES or not 1 <= entry.count <= _KEPT[entry.tag]:
        raise ValueError(f"tag {entry.tag} has type {entry.type} and {entry.count} values")
    is_outside = entry.num_bytes > len(entry.value)
    if _KEPT[entry.tag] == 1 and (is_outside or entry.type not in _INTEGERS):
        # A decoder would read a value that `_scalar` takes for absent.
        raise ValueError(f"tag {entry.tag} has type {entry.type}")
    if is_outside:
        (offset,) = layout.offset.unpack(entry.value)
        if offset + entry.num_bytes > len(data):
            raise ValueError(f"tag {entry.tag} lies outside the file")


def _rewritten(data: bytes, layout: Layout, kept: list[Entry]) -> tuple[bytes | memoryview, ...]:
    view = memoryview(data)
    head = 8 if layout.is_big else 4
    after = head + layout.offset.size
    padding = bytes(-len(data) % 8)
    table = b"".join(layout.entry.pack(entry.tag, entry.type, entry.count, entry.value) for entry in kept)
    no_next = layout.offset.pack(0)
    return (
        view[:head],
        layout.offset.pack(len(data) + len(padding)),
        view[after:],
        padding,
        layout.count.pack(len(kept)) + table + no_next,
    )

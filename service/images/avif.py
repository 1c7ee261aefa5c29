"""Finds the AV1 data of an AVIF file, and the number of pixels that a decoder allocates.

The frames may be larger than the size that the file announces, because a decoder scales them. Follows ISO
14496-12 (boxes) and 23008-12 (items). Knows nothing of limits or pixels. Raises any `Exception` for broken
data.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from service.images.av1 import max_frame_pixels

_MAX_BOXES = 65_536  # in one box; also items, and extents of all of them
_MAX_TRACKS = 16  # colours, alpha, sound; all tracks may share one large sample
_CODED, _GRID = (int.from_bytes(kind, "big") for kind in (b"av01", b"grid"))
_TO_SAMPLES = (b"mdia", b"minf", b"stbl")
_UNIQUE = {
    b"meta",
    b"moov",
    b"iloc",
    b"iinf",
    b"iref",
    b"idat",
    *_TO_SAMPLES,
    b"stsd",
    b"stsz",
    b"stco",
    b"co64",
}


def decoded_pixels(data: bytes) -> int:
    """The pixels of the largest frame, or of all frames of the largest grid."""
    top = _Box(data, 0, len(data)).children()
    most = 0
    if b"meta" in top:
        most = _item_pixels(data, top[b"meta"].after(4).children())
    if b"moov" in top:
        tracks = top[b"moov"].all_of(b"trak")
        if len(tracks) > _MAX_TRACKS:
            raise ValueError("too many tracks")
        most = max([most, *(_track_pixels(data, track) for track in tracks)])
    if not most:
        raise ValueError("no AV1 data")
    return most


@dataclass(frozen=True)
class _Box:
    """The content of a box."""

    data: bytes
    start: int
    end: int

    def after(self, count: int) -> _Box:
        return _Box(self.data, self.start + count, self.end)

    def boxes(self) -> Iterator[tuple[bytes, _Box]]:
        at = self.start
        for _ in range(_MAX_BOXES):
            if at + 8 > self.end:
                return
            size, kind, head = *struct.unpack_from(">I4s", self.data, at), 8
            if size == 1:
                (size,), head = struct.unpack_from(">Q", self.data, at + 8), 16
            end = at + size if size else self.end
            if size and size < head:
                raise ValueError("a box smaller than its header")
            yield kind, _Box(self.data, at + head, min(end, self.end))
            at = end
        raise ValueError("too many boxes")

    def children(self) -> dict[bytes, _Box]:
        """The boxes inside, by kind. Raises `ValueError` if there are two boxes where a decoder takes one."""
        found: dict[bytes, _Box] = {}
        for kind, box in self.boxes():
            if kind in found and kind in _UNIQUE:
                raise ValueError("a box is there twice")
            found[kind] = box
        return found

    def all_of(self, kind: bytes) -> list[_Box]:
        return [box for found, box in self.boxes() if found == kind]

    def numbers(self) -> _Numbers:
        return _Numbers(self.data[self.start : self.end])


class _Numbers:
    """Numbers that are read one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, num_bytes: int) -> int:
        at, self._at = self._at, self._at + num_bytes
        if self._at > len(self._data):
            raise ValueError("a truncated box")
        return int.from_bytes(self._data[at : self._at], "big")

    def version(self) -> int:
        return self.take(4) >> 24  # the rest are flags


_Extents = tuple[tuple[int, int], ...]  # start and end of the parts of an item


def _item_pixels(data: bytes, meta: dict[bytes, _Box]) -> int:
    kinds = _item_kinds(meta[b"iinf"])
    places = {item: place for item, place in _places(meta).items() if item in kinds[_CODED]}
    by_place: dict[_Extents, int] = {}
    total_bytes = 0
    for extents in set(places.values()):
        total_bytes += sum(end - start for start, end in extents)
        if total_bytes > len(data):
            raise ValueError("items overlap")
        by_place[extents] = max_frame_pixels(b"".join(data[start:end] for start, end in extents))
    pixels = {item: by_place[extents] for item, extents in places.items()}
    grids = _grids(meta[b"iref"], kinds[_GRID]) if b"iref" in meta else []
    return max([0, *pixels.values(), *(sum(pixels.get(cell, 0) for cell in cells) for cells in grids)])


def _item_kinds(iinf: _Box) -> dict[int, set[int]]:
    kinds: dict[int, set[int]] = {_CODED: set(), _GRID: set()}
    for info in iinf.after(8 if iinf.numbers().version() else 6).all_of(b"infe"):
        numbers = info.numbers()
        item = numbers.take(2 if numbers.version() < 3 else 4)
        numbers.take(2)
        kinds.setdefault(numbers.take(4), set()).add(item)
    return kinds


def _grids(iref: _Box, grids: set[int]) -> list[list[int]]:
    """The cells of each grid."""
    width = 4 if iref.numbers().version() else 2
    found = []
    for box in iref.after(4).all_of(b"dimg"):
        numbers = box.numbers()
        if numbers.take(width) in grids:
            found.append([numbers.take(width) for _ in range(numbers.take(2))])
    return found


def _places(meta: dict[bytes, _Box]) -> dict[int, _Extents]:
    numbers = meta[b"iloc"].numbers()
    version = numbers.version()
    sizes = numbers.take(2)
    offset_bytes, length_bytes, base_bytes, index_bytes = (sizes >> shift & 15 for shift in (12, 8, 4, 0))
    places: dict[int, _Extents] = {}
    num_extents = 0
    for _ in range(numbers.take(4 if version == 2 else 2)):
        item = numbers.take(4 if version == 2 else 2)
        is_inside = version > 0 and numbers.take(2) & 15 == 1
        numbers.take(2)  # which file
        base = numbers.take(base_bytes) + (meta[b"idat"].start if is_inside else 0)
        extents = []
        count = numbers.take(2)
        num_extents += count
        if num_extents > _MAX_BOXES or item in places:
            raise ValueError("too many places of items")
        for _ in range(count):
            numbers.take(index_bytes if version else 0)
            start = base + numbers.take(offset_bytes)
            extents.append((start, start + numbers.take(length_bytes)))
        places[item] = tuple(extents)
    return places


def _track_pixels(data: bytes, track: _Box) -> int:
    """The pixels of the first sample of a track; 0 if the track is not AV1."""
    box = track
    for kind in _TO_SAMPLES:
        box = box.children()[kind]
    table = box.children()
    if not table[b"stsd"].after(8).all_of(b"av01"):
        return 0
    sizes = table[b"stsz"].numbers()
    sizes.take(4)
    size = sizes.take(4) or (sizes.take(4) and sizes.take(4))
    wide = b"co64" in table
    chunks = table[b"co64" if wide else b"stco"].numbers()
    chunks.take(8)
    start = chunks.take(8 if wide else 4)
    return max_frame_pixels(data[start : start + size])

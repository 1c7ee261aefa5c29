from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from PIL import Image

from service.errors import ApiError
from service.images.av1 import max_frame_pixels
from service.images.avif import decoded_pixels
from service.images.image_file import ImageLimits, read_header
from tests.support.image_files import save

LIMITS = ImageLimits(max_image_bytes=1 << 20, max_image_pixels=1 << 20)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"quality": 100},
    {"subsampling": "4:4:4"},
    {"subsampling": "4:0:0"},
    {"save_all": True},
    {"tile_rows": 2, "tile_cols": 2},
    {"advanced": {"film-grain-test": "1"}},
]


def box(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(body), kind) + body


def full_box(kind: bytes, body: bytes, version: int = 0) -> bytes:
    return box(kind, struct.pack(">I", version << 24) + body)


def grid(cell: bytes, rows: int, columns: int, width: int, height: int) -> bytes:
    """A grid whose cells all are the image of a file without alpha, and share its data."""
    at = cell.index(b"av1C") - 4
    av1c, ispe = cell[at : at + 12], cell[cell.index(b"ispe") - 4 :][:20]
    frame = cell[cell.index(b"mdat") + 4 :]
    cells = range(2, 2 + rows * columns)
    full_size = full_box(b"ispe", struct.pack(">II", width, height))
    pixi = full_box(b"pixi", b"\3\10\10\10")
    info = [full_box(b"infe", struct.pack(">HH4sx", 1, 0, b"grid"), 2)]
    info += [full_box(b"infe", struct.pack(">HH4sx", item, 0, b"av01"), 2) for item in cells]
    layout = struct.pack(">BBBBHH", 0, 0, rows - 1, columns - 1, width, height)
    refs = box(b"dimg", struct.pack(f">HH{len(cells)}H", 1, len(cells), *cells))
    uses = struct.pack(">HBBB", 1, 2, 4, 3)
    uses += b"".join(struct.pack(">HBBBB", item, 3, 1, 0x82, 3) for item in cells)

    def file(offset: int) -> bytes:
        places = struct.pack(">HHHHII", 1, 1, 0, 1, 0, len(layout))
        places += b"".join(struct.pack(">HHHHII", item, 0, 0, 1, offset, len(frame)) for item in cells)
        meta = (
            full_box(b"hdlr", struct.pack(">I4s13x", 0, b"pict"))
            + full_box(b"pitm", b"\0\1")
            + full_box(b"iloc", struct.pack(">BBH", 0x44, 0, 1 + len(cells)) + places, 1)
            + full_box(b"iinf", struct.pack(">H", len(info)) + b"".join(info))
            + full_box(b"iref", refs)
            + box(
                b"iprp",
                box(b"ipco", ispe + av1c + pixi + full_size)
                + full_box(b"ipma", struct.pack(">I", 1 + len(cells)) + uses),
            )
            + box(b"idat", layout)
        )
        return box(b"ftyp", b"avif\0\0\0\0avifmif1miaf") + full_box(b"meta", meta) + box(b"mdat", frame)

    return file(len(file(0)) - len(frame))


def with_size(data: bytes, width: int, height: int) -> bytes:
    """The file with other sizes in all of its boxes but the same frames."""
    at = data.find(b"ispe")
    while at >= 0:
        data = data[: at + 8] + struct.pack(">II", width, height) + data[at + 16 :]
        at = data.find(b"ispe", at + 4)
    return data


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
@pytest.mark.parametrize("size", [(1, 1), (45, 31), (128, 200)])
def test_pixels_of_frames_are_those_of_the_image(
    size: tuple[int, int], mode: str, options: dict[str, Any]
) -> None:
    image = Image.new(mode, size)
    data = save(image, "AVIF", append_images=[image], **options)
    assert decoded_pixels(data) == size[0] * size[1]


@pytest.mark.parametrize("is_sequence", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_size_of_frames_counts_if_it_exceeds_the_announced_size(mode: str, is_sequence: bool) -> None:
    small = save(Image.new(mode, (512, 512)), "AVIF", speed=10)
    honest = read_header(small, LIMITS).decoding_bytes
    lie = read_header(with_size(small, 64, 64), LIMITS)
    assert (lie.width, lie.height, lie.decoding_bytes) == (64, 64, honest)
    large = Image.new(mode, (2048, 2048))
    data = save(large, "AVIF", speed=10, save_all=is_sequence, append_images=[large])
    with pytest.raises(ApiError) as refusal:
        read_header(with_size(data, 64, 64), LIMITS)
    assert (refusal.value.status, refusal.value.code) == (413, "too_many_pixels")


def test_all_cells_of_a_grid_count() -> None:
    cell = save(Image.new("RGB", (64, 64), (200, 30, 60)), "AVIF", quality=100, subsampling="4:4:4")
    data = grid(cell, 2, 3, 180, 128)
    rgb = read_header(data, LIMITS).decode()
    assert rgb.shape == (128, 180, 3)
    assert np.abs(rgb.astype(int) - (200, 30, 60)).max() <= 3
    assert decoded_pixels(data) == 6 * 64 * 64


class Writer:
    """Bits, most significant first."""

    def __init__(self, *numbers: tuple[int, int]) -> None:
        self.bits = "".join(f"{number:0{count}b}" for number, count in numbers)

    def unit(self, kind: int) -> bytes:
        padded = self.bits + "1" + "0" * (-(len(self.bits) + 1) % 8)
        body = int(padded, 2).to_bytes(len(padded) // 8, "big")
        return bytes((kind << 3 | 2, len(body))) + body


# Timing with a decoder model, one operating point with it, sizes of 8 and 9 bits, numbers of frames,
# the order of frames, and screen content left to each frame.
TIMING = ((1, 1), (1, 32), (1, 32), (0, 1), (1, 1), (9, 5), (1, 32), (9, 5), (4, 5), (1, 1))
POINT = ((0, 5), (0, 12), (8, 5), (0, 1), (1, 1), (0, 21), (1, 1), (5, 4))
SIZES = ((7, 4), (8, 4), (199, 8), (299, 9), (1, 1), (3, 4), (2, 3))
TOOLS = ((0, 7), (1, 1), (0, 2), (1, 1), (1, 1), (6, 3), (0, 8))
SEQUENCE = Writer((0, 3), (0, 2), *TIMING, *POINT, *SIZES, *TOOLS, (0, 40)).unit(1)


@pytest.mark.parametrize(("override", "pixels"), [(0, 200 * 300), (1, 256 * 512)])
@pytest.mark.parametrize(
    "start",
    [
        ((0, 3), (1, 1), (31, 5)),  # a key frame that is shown at a time
        ((0, 3), (0, 1), (1, 1), (1, 1)),  # a key frame that is not shown
        ((1, 3), (1, 1), (31, 5), (1, 1)),
    ],
)
def test_size_of_a_frame_overrides_that_of_the_sequence(
    start: tuple[tuple[int, int], ...], override: int, pixels: int
) -> None:
    for tools in (((0, 1), (0, 1)), ((1, 1), (1, 1), (1, 1))):
        frame = Writer(*start, *tools, (0xAA, 8), (override, 1), (0, 40)).unit(6)
        assert max_frame_pixels(SEQUENCE + frame) == pixels


def test_data_without_frames_or_with_too_many_are_refused() -> None:
    frame = Writer((0, 3), (1, 1), (0, 60)).unit(6)
    padding = b"\x12\0"
    assert max_frame_pixels(SEQUENCE + 4 * frame + 1000 * padding) == 60_000
    many = SEQUENCE + 5 * frame, SEQUENCE + 5000 * padding + frame
    for data in (b"", SEQUENCE, frame, SEQUENCE + frame[:-1], *many):
        with pytest.raises(ValueError, match=r"."):
            max_frame_pixels(data)


def test_first_sample_of_a_sequence_counts_without_items() -> None:
    image = Image.new("RGB", (45, 31))
    data = save(image, "AVIF", save_all=True, append_images=[image])
    assert decoded_pixels(data.replace(b"meta", b"free", 1)) == 45 * 31


@pytest.mark.parametrize("kind", [b"iloc", b"iinf"])
def test_duplicate_box_is_refused(kind: bytes) -> None:
    data = save(Image.new("RGB", (45, 31)), "AVIF")
    with pytest.raises(ValueError, match="twice"):
        decoded_pixels(data.replace(b"pitm", kind))


def test_overlapping_items_are_refused_unless_they_are_equal() -> None:
    cell = save(Image.new("RGB", (64, 64)), "AVIF")
    data = grid(cell + bytes(2000), 2, 2, 128, 128)
    size = len(cell) - cell.index(b"mdat") - 4 + 2000
    place = struct.pack(">I", data.index(b"mdat") + 4) + struct.pack(">I", size)
    assert decoded_pixels(data) == 4 * 64 * 64
    first = data.index(place)
    with pytest.raises(ValueError, match="overlap"):
        decoded_pixels(data[:first] + place[:7] + bytes([place[7] - 1]) + data[first + 8 :])


def test_file_of_very_many_tracks_is_refused() -> None:
    image = Image.new("RGB", (45, 31))
    data = save(image, "AVIF", save_all=True, append_images=[image])
    at = data.index(b"trak") - 4
    (size,) = struct.unpack_from(">I", data, at)
    track = data[at : at + size]
    assert decoded_pixels(data + box(b"mooX", b"")) == 45 * 31
    with pytest.raises(ValueError, match="tracks"):
        decoded_pixels(data.replace(b"moov", b"mooX") + box(b"moov", 17 * track))

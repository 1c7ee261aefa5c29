"""No decoder writes to stderr, whatever is wrong with a file."""

from __future__ import annotations

import os
import random
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from service.errors import ApiError
from service.images.image_file import ImageLimits, read_header
from service.images.libtiff import silence_libtiff
from tests.support.broken_files import SEEDS, mutated
from tests.support.image_files import save, tiff

LIMITS = ImageLimits(max_image_bytes=20 << 20, max_image_pixels=2**26)
FAX = {"tiff_ccitt": 2, "group3": 3, "group4": 4}
NO_ROW = b"\0\x80"  # no code starts with so many zeros


def fax_tiff(width: int, height: int, data: bytes, compression: int) -> bytes:
    return tiff(width, height, data, {258: (1,), 259: (compression,), 262: (0,), 277: (1,), 278: (height,)})


def outcome(data: bytes) -> int:
    try:
        read_header(data, LIMITS).decode()
    except ApiError as error:
        return error.status
    return 200


@pytest.mark.parametrize("compression", FAX.values())
def test_fax_with_more_rows_than_its_data_can_hold_is_refused(
    compression: int, capfd: pytest.CaptureFixture[str]
) -> None:
    data = fax_tiff(580, 115_700, NO_ROW * 20, compression)
    assert outcome(data) == 400
    with pytest.raises(ApiError, match="the TIFF data is broken or truncated"):
        read_header(data, LIMITS)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("compression", FAX.values())
def test_fax_whose_rows_are_all_broken_writes_nothing(
    compression: int, capfd: pytest.CaptureFixture[str]
) -> None:
    os.write(2, b"captured")
    assert outcome(fax_tiff(580, 20_000, NO_ROW * 10_000, compression)) in (200, 400)
    assert capfd.readouterr().err == "captured"


@pytest.mark.parametrize("compression", FAX)
def test_fax_of_the_shortest_rows_is_served(compression: str) -> None:
    page = save(Image.new("1", (8, 4000), 1), "TIFF", compression=compression)
    assert read_header(page, LIMITS).decode().min() == 255


def test_fax_without_sizes_of_its_strips_is_served_or_refused() -> None:
    page = save(Image.new("1", (8, 400), 1), "TIFF", compression="group4")
    assert outcome(page.replace(struct.pack("<H", 279), struct.pack("<H", 700), 1)) in (200, 400)


@pytest.mark.parametrize("name", SEEDS)
def test_broken_files_of_every_format_write_nothing(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(name)
    files = [mutated(SEEDS[name], rng) or b"\0" for _ in range(100)]
    with ThreadPoolExecutor(2) as threads:
        assert set(threads.map(outcome, files)) <= {200, 400, 413, 415}
    assert capfd.readouterr().err == ""


def test_a_libtiff_that_cannot_be_silenced_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("PIL._imaging.__file__", "libc.so.6")
    silence_libtiff()
    assert "cannot be silenced" in caplog.text

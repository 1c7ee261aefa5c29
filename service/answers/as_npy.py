"""Writes one array in NumPy's file format, which has no bfloat16 and holds nothing else."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from service.answers.answer import EmbeddedImages, Piece
from service.answers.arrays import bytes_of, little_endian


def npy_pieces(embedded: EmbeddedImages) -> Iterator[Piece]:
    """An array [images, hidden] if pooled, else [tokens, width] of the only image."""
    return npy_file(little_endian(embedded.rows()))


def npy_file(array: npt.NDArray[Any]) -> Iterator[Piece]:
    """A contiguous array as the bytes of a `.npy` file, without a copy of its numbers."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    yield header.getvalue()
    yield bytes_of(array)

"""Writes tensors on the host as bytes and as text, slice by slice. Knows numbers only.

A call of the JSON or base64 encoder holds the interpreter lock until it returns. Other threads run between
two calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pybase64
import torch

from service.answers.answer import Piece
from service.errors import NonFiniteOutput, image_param

_SLICE_BYTES = 3 << 18  # encoded to base64 in one call; a multiple of 3, so that slices join without padding
_BFLOAT16_INFINITY = 0x7F80  # the bits of infinity without the sign; those of NaN are larger
_CHECKED_NUMBERS = 2**20  # checked in one call, because the check allocates memory


def check_finite(embedding: torch.Tensor, index: int) -> None:
    """Raises `NonFiniteOutput`, which names the image by `index`, for an infinity or NaN."""
    is_small = embedding.numel() <= _CHECKED_NUMBERS  # most are small, and splitting takes microseconds
    parts = (embedding,) if is_small else embedding.split(max(1, _CHECKED_NUMBERS // embedding.shape[-1]))
    if not all(_is_finite(part) for part in parts):
        raise NonFiniteOutput("the embedding holds a number that is not finite", param=image_param(index))


def _is_finite(part: torch.Tensor) -> bool:
    """Uses numpy, which takes a tenth of torch's time."""
    if part.dtype == torch.bfloat16:
        magnitudes = part.view(torch.int16).numpy() & 0x7FFF
        return int(magnitudes.max()) < _BFLOAT16_INFINITY
    return bool(np.isfinite(part.numpy()).all())


def little_endian(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The numbers in little-endian order, copied only if they are in another. bfloat16 becomes int16."""
    array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def json_numbers(tensor: torch.Tensor) -> Iterator[bytes]:
    """A JSON array of float32 numbers, each as the shortest text that reads back as the same number."""
    assert tensor.dtype == torch.float32, f"JSON floats are float32, not {tensor.dtype}"
    array = tensor.numpy()
    if array.ndim == 1:
        yield orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
        return
    yield b"["
    for i, row in enumerate(array):
        yield b"," if i else b""
        yield orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)
    yield b"]"


class Base64Writer:
    """A write-only file that keeps base64 of its bytes."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._rest = b""  # fewer than 3 bytes, until more bytes come

    def write(self, data: Piece) -> int:
        """Takes the next bytes and returns their number."""
        num_bytes = len(data)
        if self._rest:
            first = -len(self._rest) % 3
            data, head = data[first:], self._rest + bytes(data[:first])
            if len(head) < 3:
                self._rest = head
                return num_bytes
            self._pieces.append(pybase64.b64encode(head))
        end = len(data) // 3 * 3
        for start in range(0, end, _SLICE_BYTES):
            self._pieces.append(pybase64.b64encode(data[start : min(start + _SLICE_BYTES, end)]))
        self._rest = bytes(data[end:])
        return num_bytes

    def flush(self) -> None:
        """Does nothing. `torch.save` calls it."""

    def finish(self) -> list[bytes]:
        """Returns the base64 of all bytes written, with padding, in pieces."""
        return [*self._pieces, pybase64.b64encode(self._rest)]


def base64_text(tensor: torch.Tensor) -> list[bytes]:
    """base64 of the little-endian bytes of a tensor, in pieces."""
    writer = Base64Writer()
    writer.write(bytes_of(little_endian(tensor)))
    return writer.finish()

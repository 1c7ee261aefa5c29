"""Tensors on the host as bytes and as text, little by little. Knows numbers only.

One call of the JSON or base64 encoder holds the interpreter lock until it ends, and other threads get their
turn between two calls.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import torch

from service.answers.answer import Piece
from service.errors import NonFiniteOutput, image_param

_SLICE_BYTES = 3 << 18  # bytes given to base64 at once; a multiple of 3, so that slices join without padding
_BFLOAT16_INFINITY = 0x7F80  # its bits; those of what is no number are above
_CHECKED_NUMBERS = 2**20  # at once, as the check takes memory of its own


def check_finite(embedding: torch.Tensor, index: int) -> None:
    """Raises `NonFiniteOutput`, which names the image, for an infinity or no number."""
    is_small = embedding.numel() <= _CHECKED_NUMBERS  # as most are, and splitting takes microseconds
    parts = (embedding,) if is_small else embedding.split(max(1, _CHECKED_NUMBERS // embedding.shape[-1]))
    if not all(_is_finite(part) for part in parts):
        name = image_param(index)
        raise NonFiniteOutput(f"the embedding of {name} holds a number that is not finite", param=name)


def _is_finite(part: torch.Tensor) -> bool:
    """By numpy, for a tenth of what torch takes."""
    if part.dtype == torch.bfloat16:
        magnitudes = part.view(torch.int16).numpy() & 0x7FFF
        return int(magnitudes.max()) < _BFLOAT16_INFINITY
    return bool(np.isfinite(part.numpy()).all())


def little_endian(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The numbers in little-endian order, not copied if they are; bfloat16, which numpy lacks, as int16."""
    array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array, not copied."""
    return array.reshape(-1).view(np.uint8).data


def json_numbers(tensor: torch.Tensor) -> Iterator[bytes]:
    """A JSON array of float32 numbers, each the shortest that reads back as the same."""
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
    """A file that can only be written, and that is kept as base64."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._rest = b""  # fewer than 3 bytes, which wait for more

    def write(self, data: Piece) -> int:
        """Takes the next bytes; says how many they were."""
        num_bytes = len(data)
        if self._rest:
            first = -len(self._rest) % 3
            data, head = data[first:], self._rest + bytes(data[:first])
            if len(head) < 3:
                self._rest = head
                return num_bytes
            self._pieces.append(base64.b64encode(head))
        end = len(data) // 3 * 3
        for start in range(0, end, _SLICE_BYTES):
            self._pieces.append(base64.b64encode(data[start : min(start + _SLICE_BYTES, end)]))
        self._rest = bytes(data[end:])
        return num_bytes

    def flush(self) -> None:
        """Called by who writes files; there is nothing to do."""

    def finish(self) -> list[bytes]:
        """The base64 of all that was written, with its padding, in pieces."""
        return [*self._pieces, base64.b64encode(self._rest)]


def base64_text(tensor: torch.Tensor) -> list[bytes]:
    """base64 of the little-endian bytes, in pieces."""
    writer = Base64Writer()
    writer.write(bytes_of(little_endian(tensor)))
    return writer.finish()

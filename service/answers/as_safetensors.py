"""Writes one safetensors file: all embeddings, and the number of rows of each image.

The writer of the library copies everything in one call that holds the interpreter lock, which takes seconds
for a gigabyte. So the file is written here: the length of a JSON header, the header, and the numbers as they
are. Source: the description of the format in the documentation of safetensors.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import orjson

from service.answers.answer import EmbeddedImages, Piece
from service.answers.arrays import bytes_of, little_endian

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ALIGNMENT = 8  # of the numbers, in bytes; the 8-byte integers come first, so that all are aligned


def safetensors_pieces(embedded: EmbeddedImages) -> Iterator[Piece]:
    """`grid_thw` [images, 3], `num_tokens` [images], `embeddings` [images, hidden] or [all tokens, width]."""
    grids = np.array([image.grid_thw for image in embedded.images], dtype="<i8")
    num_tokens = np.array([image.num_tokens for image in embedded.images], dtype="<i8")
    pieces = [bytes_of(little_endian(embedding)) for embedding in embedded.embeddings]
    num_rows = len(pieces) if embedded.options.pooling == "mean" else embedded.num_tokens
    shape = (num_rows, embedded.embeddings[0].shape[-1])
    header: dict[str, object] = {"__metadata__": _metadata(embedded)}
    end = 0
    for name, dtype, tensor_shape, num_bytes in (
        ("grid_thw", "I64", grids.shape, grids.nbytes),
        ("num_tokens", "I64", num_tokens.shape, num_tokens.nbytes),
        ("embeddings", _DTYPES[embedded.dtype], shape, sum(map(len, pieces))),
    ):
        header[name] = {"dtype": dtype, "shape": tensor_shape, "data_offsets": (end, end + num_bytes)}
        end += num_bytes
    text = orjson.dumps(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    yield bytes_of(grids)
    yield bytes_of(num_tokens)
    yield from pieces


def _metadata(embedded: EmbeddedImages) -> dict[str, str]:
    """The metadata, which safetensors allows as text only. A revision that is not known is empty."""
    return {
        "model": embedded.model.name,
        "revision": embedded.model.revision or "",
        "fingerprint": embedded.model.fingerprint,
        "pooling": embedded.options.pooling,
        "deepstack": str(embedded.options.deepstack).lower(),
        "dtype": embedded.dtype,
    }

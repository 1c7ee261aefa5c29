"""One safetensors file: all embeddings, and which rows are whose."""

from __future__ import annotations

from collections.abc import Iterator

import safetensors.torch
import torch

from service.encoding.answer import Embedded, Piece


def safetensors_pieces(embedded: Embedded) -> Iterator[Piece]:
    """`embeddings` [images, hidden] or [all tokens, width], `grid_thw` [images, 3], `num_tokens` [images]."""
    tensors = {
        "embeddings": embedded.rows(),
        "grid_thw": torch.tensor([image.grid_thw for image in embedded.images], dtype=torch.int64),
        "num_tokens": torch.tensor([image.num_tokens for image in embedded.images], dtype=torch.int64),
    }
    metadata = {  # text only; a revision that is not known is the empty one
        "model": embedded.model.name,
        "revision": embedded.model.revision or "",
        "fingerprint": embedded.model.fingerprint,
        "pooling": embedded.options.pooling,
        "deepstack": str(embedded.options.deepstack).lower(),
        "dtype": embedded.dtype,
    }
    yield safetensors.torch.save(tensors, metadata)

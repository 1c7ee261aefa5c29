"""Pooled vectors of images that were embedded before, in the memory of one API server."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

from models import OutputSpec
from service.answers.answer import ImageFacts

_OVERHEAD_BYTES = 1024  # of one entry, beside the numbers of its vector


@dataclass(frozen=True)
class VectorKey:
    """Two images with the same key have the same vector."""

    sha256: str  # of the bytes of the image file, in hex
    output: OutputSpec


@dataclass(frozen=True, eq=False)
class EmbeddedImage:
    """One image, and its embedding on the host."""

    facts: ImageFacts
    embedding: torch.Tensor


class VectorCache:
    """Keeps the vectors that were used last, up to `limit_bytes`. One thread uses it."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._images: OrderedDict[VectorKey, EmbeddedImage] = OrderedDict()

    def find(self, key: VectorKey) -> EmbeddedImage | None:
        """The image, if it is kept."""
        found = self._images.get(key)
        if found is not None:
            self._images.move_to_end(key)
        return found

    def put(self, key: VectorKey, image: EmbeddedImage) -> None:
        """Keeps a copy of the vector, and drops vectors that were not used for long."""
        if key in self._images or _num_bytes(image) > self._limit_bytes:
            return
        # A copy, because the vectors of a batch share their memory.
        copy = EmbeddedImage(image.facts, image.embedding.clone())
        self._images[key] = copy
        self._used_bytes += _num_bytes(copy)
        while self._used_bytes > self._limit_bytes:
            _, oldest = self._images.popitem(last=False)
            self._used_bytes -= _num_bytes(oldest)


def _num_bytes(image: EmbeddedImage) -> int:
    return image.embedding.nbytes + _OVERHEAD_BYTES

"""The data that an answer is made from, and the answer: its bytes in pieces, which are sent as they are.

Knows nothing of the forms of an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from service.answers.answer_options import AnswerOptions
from service.answers.dtypes import DtypeName, dtype_name

Piece = bytes | memoryview  # a memoryview has items of one byte, so that `len` is the number of bytes

_PIECE_BYTES = 2**20  # smaller pieces are joined, because each piece costs a call down to the socket


@dataclass(frozen=True)
class Answer:
    """The body of an answer. Its pieces are never joined into one, because a body may have a gigabyte."""

    body: tuple[Piece, ...]  # at least one
    media_type: str

    @property
    def num_bytes(self) -> int:
        """The length of the body."""
        return sum(len(piece) for piece in self.body)


@dataclass(frozen=True)
class ModelIdentity:
    """The model that made the vectors, as every answer names it."""

    name: str
    revision: str | None
    fingerprint: str


@dataclass(frozen=True)
class ImageFacts:
    """What an answer says about one image, apart from its embedding."""

    num_tokens: int
    grid_thw: tuple[int, int, int]  # in patches, before the spatial merge
    width: int  # in pixels, of the image as seen, after its EXIF orientation
    height: int
    sha256: str  # of the bytes sent, in hex


@dataclass(frozen=True, eq=False)
class EmbeddedImages:
    """The images of one request with their embeddings: finite, contiguous, on the host, all of one dtype."""

    model: ModelIdentity
    options: AnswerOptions
    images: Sequence[ImageFacts]  # at least one
    embeddings: Sequence[torch.Tensor]  # each [hidden] if pooled, else [tokens, width]

    @property
    def dtype(self) -> DtypeName:
        """The dtype of the embeddings, which is the model's own if the request named none."""
        return dtype_name(self.embeddings[0].dtype)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all images."""
        return sum(image.num_tokens for image in self.images)

    def rows(self) -> torch.Tensor:
        """[images, hidden] if pooled, else [all tokens, width]. Tokens of a single image are not copied."""
        if self.options.pooling == "mean":
            return torch.stack(tuple(self.embeddings))
        return self.embeddings[0] if len(self.embeddings) == 1 else torch.cat(tuple(self.embeddings))


def join_pieces(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The same bytes in fewer pieces: small neighbours are joined, large pieces stay as they are."""
    joined: list[Piece] = []
    small: list[Piece] = []
    num_small = 0
    for piece in pieces:
        if len(piece) < _PIECE_BYTES:
            small.append(piece)
            num_small += len(piece)
        if len(piece) >= _PIECE_BYTES or num_small >= _PIECE_BYTES:
            joined.append(b"".join(small))
            small, num_small = [], 0
        if len(piece) >= _PIECE_BYTES:
            joined.append(piece)
    return tuple(piece for piece in (*joined, b"".join(small)) if piece)

"""Writes embeddings as the body of an answer, in the form that the options name.

Large arrays never become Python lists. No call holds the interpreter lock for long, as far as the libraries
allow that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from service.answers.answer import Answer, EmbeddedImages, ImageFacts, ModelIdentity, Piece, join_pieces
from service.answers.answer_options import AnswerFormat, AnswerOptions
from service.answers.arrays import check_finite
from service.answers.as_json import json_pieces
from service.answers.as_npy import npy_pieces
from service.answers.as_openai import openai_pieces
from service.answers.as_safetensors import safetensors_pieces
from service.answers.as_vllm import vllm_pieces


@dataclass(frozen=True)
class _Writer:
    """How a form of answer is written."""

    media_type: str
    pieces: Callable[[EmbeddedImages], Iterable[Piece]]


_WRITERS: Mapping[AnswerFormat, _Writer] = {
    "json": _Writer("application/json", json_pieces),
    "safetensors": _Writer("application/x-safetensors", safetensors_pieces),
    "npy": _Writer("application/x-npy", npy_pieces),
    "vllm": _Writer("application/json", vllm_pieces),
    "openai": _Writer("application/json", openai_pieces),
}


def serialize(
    model: ModelIdentity,
    options: AnswerOptions,
    images: Sequence[ImageFacts],
    embeddings: Sequence[torch.Tensor],
) -> Answer:
    """The answer for images and their embeddings, each [hidden] or [tokens, width], on the host.

    Raises `NonFiniteOutput` if a number is infinite or NaN, because such vectors cannot be compared.
    """
    for index, embedding in enumerate(embeddings):
        check_finite(embedding, index)
    embedded = EmbeddedImages(model, options, images, [embedding.contiguous() for embedding in embeddings])
    writer = _WRITERS[options.format]
    return Answer(join_pieces(writer.pieces(embedded)), writer.media_type)

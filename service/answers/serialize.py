"""`serialize`: embeddings become the body of an answer, in the form that the options name.

Large arrays never pass through Python lists, and no call holds the interpreter lock for long where the
library gives a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from service.answers.answer import Answer, Embedded, ImageFacts, ModelIdentity, Piece, join_pieces
from service.answers.answer_options import AnswerFormat, AnswerOptions
from service.answers.arrays import check_finite
from service.answers.as_json import json_pieces
from service.answers.as_npy import npy_pieces
from service.answers.as_openai import openai_pieces
from service.answers.as_safetensors import safetensors_pieces
from service.answers.as_vllm import vllm_pieces


@dataclass(frozen=True)
class _Form:
    media_type: str
    pieces: Callable[[Embedded], Iterable[Piece]]


_FORMS: Mapping[AnswerFormat, _Form] = {
    "json": _Form("application/json", json_pieces),
    "safetensors": _Form("application/x-safetensors", safetensors_pieces),
    "npy": _Form("application/x-npy", npy_pieces),
    "vllm": _Form("application/json", vllm_pieces),
    "openai": _Form("application/json", openai_pieces),
}


def serialize(
    model: ModelIdentity,
    options: AnswerOptions,
    images: Sequence[ImageFacts],
    embeddings: Sequence[torch.Tensor],
) -> Answer:
    """The answer for images and their embeddings, each [hidden] or [tokens, width], on the host.

    Raises `NonFiniteOutput` if any number is infinite or not a number: such a vector may not be compared.
    """
    for index, embedding in enumerate(embeddings):
        check_finite(embedding, index)
    embedded = Embedded(model, options, images, [embedding.contiguous() for embedding in embeddings])
    form = _FORMS[options.format]
    return Answer(join_pieces(form.pieces(embedded)), form.media_type)

"""Writes the answer of `/v1/embeddings`, with the members of OpenAI's embeddings API and no others."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from service.answers.answer import EmbeddedImages, Piece
from service.answers.as_json import embedding_head


def openai_pieces(embedded: EmbeddedImages) -> Iterator[Piece]:
    """`{"object": "list", "data": [entry, …], "model": …, "usage": …}`; usage counts image tokens."""
    encoding_format = embedded.options.encoding_format
    assert encoding_format is not None, "JSON needs an encoding of numbers"
    yield b'{"object":"list","data":['
    for index, embedding in enumerate(embedded.embeddings):
        yield b"," if index else b""
        yield from embedding_head(index, embedding, encoding_format)
        yield b"}"
    usage = {"prompt_tokens": embedded.num_tokens, "total_tokens": embedded.num_tokens}
    yield b"]," + orjson.dumps({"model": embedded.model.name, "usage": usage})[1:]

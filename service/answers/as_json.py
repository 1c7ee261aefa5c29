"""Writes the JSON answer of `/embed`: each image with its facts, and numbers as JSON or base64."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
import torch

from service.answers.answer import EmbeddedImages, ImageFacts, Piece
from service.answers.answer_options import EncodingFormat
from service.answers.arrays import base64_text, json_numbers


def json_pieces(embedded: EmbeddedImages) -> Iterator[Piece]:
    """`{"object": "list", …, "data": [entry, …], "usage": …}`"""
    head = {
        "object": "list",
        "model": embedded.model.name,
        "revision": embedded.model.revision,
        "fingerprint": embedded.model.fingerprint,
        "dtype": embedded.dtype,
    }
    yield orjson.dumps(head)[:-1]
    yield b',"data":['
    encoding_format = embedded.options.encoding_format
    assert encoding_format is not None, "JSON needs an encoding of numbers"
    for index, (image, embedding) in enumerate(zip(embedded.images, embedded.embeddings, strict=True)):
        yield b"," if index else b""
        yield from _entry(index, image, embedding, encoding_format)
    usage = {"num_images": len(embedded.images), "num_tokens": embedded.num_tokens}
    yield b'],"usage":' + orjson.dumps(usage) + b"}"


def _entry(
    index: int, image: ImageFacts, embedding: torch.Tensor, encoding_format: EncodingFormat
) -> Iterator[Piece]:
    """One item of `data`."""
    facts: dict[str, object] = {
        "num_tokens": image.num_tokens,
        "grid_thw": image.grid_thw,
        "width": image.width,
        "height": image.height,
        "sha256": image.sha256,
    }
    if encoding_format == "base64":
        facts = {"shape": tuple(embedding.shape), **facts}
    yield from embedding_head(index, embedding, encoding_format)
    yield b","
    yield orjson.dumps(facts)[1:]


def embedding_head(index: int, embedding: torch.Tensor, encoding_format: EncodingFormat) -> Iterator[Piece]:
    """The start of an entry, up to its numbers: `{"object": "embedding", "index": 0, "embedding": […]`."""
    yield b'{"object":"embedding","index":%d,"embedding":' % index
    if encoding_format == "base64":
        yield b'"'
        yield from base64_text(embedding)
        yield b'"'
    else:
        yield from json_numbers(embedding)

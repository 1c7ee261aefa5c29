"""Writes content parts that a chat request to vLLM may hold in place of images.

Each image becomes one `image_embeds` part: all tokens with their deepstack columns, as base64 of a file that
vLLM reads. Source: vLLM 0.33, `--enable-mm-embeds`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import IO, cast

import orjson
import torch

from service.answers.answer import EmbeddedImages, ImageFacts, Piece
from service.answers.arrays import Base64Writer, little_endian
from service.answers.as_npy import npy_file
from service.answers.dtypes import DtypeName


def vllm_pieces(embedded: EmbeddedImages) -> Iterator[Piece]:
    """`{"model", "revision", "fingerprint", "dtype", "token_width", "content": [part, …]}`"""
    head = {
        "model": embedded.model.name,
        "revision": embedded.model.revision,
        "fingerprint": embedded.model.fingerprint,
        "dtype": embedded.dtype,
        "token_width": embedded.embeddings[0].shape[1],
    }
    yield orjson.dumps(head)[:-1]
    yield b',"content":['
    for index, (image, tokens) in enumerate(zip(embedded.images, embedded.embeddings, strict=True)):
        yield b"," if index else b""
        yield from _part(image_uuid(embedded.model.fingerprint, image.sha256, embedded.dtype), image, tokens)
    yield b"]}"


def image_uuid(fingerprint: str, sha256: str, dtype: DtypeName) -> str:
    """The key of an image's tokens, here and in vLLM's caches. `sha256` is of the bytes of the image file.

    It changes with everything that could change the tokens.
    """
    return "vs1-" + hashlib.sha256(f"{fingerprint} {sha256} {dtype}".encode()).hexdigest()


def _part(uuid: str, image: ImageFacts, tokens: torch.Tensor) -> Iterator[Piece]:
    yield orjson.dumps({"type": "image_embeds", "uuid": uuid})[:-1]
    yield b',"image_embeds":{"image_embeds":"'
    yield from _file(tokens)
    yield b'",'
    yield orjson.dumps({"image_grid_thw": image.grid_thw})[1:]
    yield b"}"


def _file(tokens: torch.Tensor) -> list[bytes]:
    """base64 of a torch file for bfloat16, which `.npy` lacks, and of a `.npy` file for other types."""
    writer = Base64Writer()
    if tokens.dtype == torch.bfloat16:
        # The file holds the whole storage, which no other image shares. Of a file, torch calls only `write`
        # and `flush`.
        torch.save(tokens, cast(IO[bytes], writer))
    else:
        for piece in npy_file(little_endian(tokens)):
            writer.write(piece)
    return writer.finish()

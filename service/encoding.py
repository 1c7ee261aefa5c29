"""Embeddings → the body of an answer. Knows shapes, numbers and the answer's members; nothing of requests.

Large arrays are written row by row: one call of the JSON or base64 encoder holds the interpreter lock until
it ends, and other threads get their turn between two calls.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import torch

from service.errors import NonFiniteOutput, image_param
from service.options import EmbedOptions, EncodingFormat

_SLICE_BYTES = 3 << 18  # bytes given to base64 at once; a multiple of 3, so that slices join without padding


@dataclass(frozen=True)
class ModelIdentity:
    """Which model made the vectors, as every response says it."""

    name: str
    revision: str | None
    fingerprint: str


@dataclass(frozen=True)
class ImageFacts:
    """What the response says of one image beside its embedding."""

    num_tokens: int
    grid_thw: tuple[int, int, int]  # in patches, before the spatial merge
    width: int  # in pixels, of the image as seen, after its EXIF orientation
    height: int
    sha256: str  # of the bytes sent, in hex


def encode_json(
    model: ModelIdentity,
    options: EmbedOptions,
    images: Sequence[ImageFacts],
    embeddings: Sequence[torch.Tensor],
) -> bytes:
    """The JSON body for images and their embeddings, each [hidden] or [tokens, width], on the host.

    Raises `NonFiniteOutput` if any number is infinite or not a number: neither has a form in JSON, and
    neither may be compared.
    """
    head = {
        "object": "list",
        "model": model.name,
        "revision": model.revision,
        "fingerprint": model.fingerprint,
        "dtype": options.dtype,
    }
    usage = {"num_images": len(images), "num_tokens": sum(image.num_tokens for image in images)}
    parts = [orjson.dumps(head)[:-1], b',"data":[']
    for index, (image, embedding) in enumerate(zip(images, embeddings, strict=True)):
        parts.append(b"," if index else b"")
        parts.extend(_entry(index, image, embedding, options.encoding_format))
    parts += [b'],"usage":', orjson.dumps(usage), b"}"]
    return b"".join(parts)


def _entry(
    index: int, image: ImageFacts, embedding: torch.Tensor, encoding_format: EncodingFormat
) -> Iterator[bytes]:
    """One member of `data`, in pieces."""
    array = _finite_array(embedding, index)
    facts: dict[str, object] = {
        "num_tokens": image.num_tokens,
        "grid_thw": image.grid_thw,
        "width": image.width,
        "height": image.height,
        "sha256": image.sha256,
    }
    yield b'{"object":"embedding","index":%d,"embedding":' % index
    if encoding_format == "base64":
        facts = {"shape": array.shape, **facts}
        yield b'"'
        yield from _base64_slices(array)
        yield b'"'
    else:
        yield from _json_rows(array)
    yield b","
    yield orjson.dumps(facts)[1:]


def _finite_array(embedding: torch.Tensor, index: int) -> npt.NDArray[Any]:
    """The numbers in memory of their own order; those of bfloat16, which numpy lacks, as int16."""
    if embedding.dtype == torch.bfloat16:
        array, finite = embedding.view(torch.int16).numpy(), bool(torch.isfinite(embedding).all())
    else:
        array = embedding.numpy()
        finite = bool(np.isfinite(array).all())  # a tenth of torch's cost for one vector
    if not finite:
        name = image_param(index)
        raise NonFiniteOutput(f"the embedding of {name} holds a number that is not finite", param=name)
    return array


def _json_rows(array: npt.NDArray[np.float32]) -> Iterator[bytes]:
    """A JSON array of a float32 array, each number the shortest that reads back as the same float32."""
    assert array.dtype == np.float32, f"JSON floats are float32, not {array.dtype}"
    if array.ndim == 1:
        yield orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
        return
    yield b"["
    for i, row in enumerate(array):
        yield b"," if i else b""
        yield orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)
    yield b"]"


def _base64_slices(array: npt.NDArray[Any]) -> Iterator[bytes]:
    """base64 of little-endian bytes; nothing is copied before where the machine is little-endian."""
    data = array.astype(array.dtype.newbyteorder("<"), copy=False).reshape(-1).data.cast("B")
    for start in range(0, len(data), _SLICE_BYTES):
        yield base64.b64encode(data[start : start + _SLICE_BYTES])

"""Reads answers of every format, as a client would."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import httpx
import numpy as np
import safetensors.torch
import torch

from service.routes.schemas import ErrorResponse


def from_json(body: bytes) -> list[torch.Tensor]:
    """The embeddings of the JSON answer of `/embed` or `/v1/embeddings`, numbers or base64."""
    document = json.loads(body)
    dtype = getattr(torch, document.get("dtype", "float32"))
    return [_from_entry(entry, dtype) for entry in document["data"]]


def _from_entry(entry: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    if not isinstance(entry["embedding"], str):
        return torch.tensor(entry["embedding"], dtype=dtype)
    data = bytearray(base64.b64decode(entry["embedding"], validate=True))
    return torch.frombuffer(data, dtype=dtype).reshape(entry.get("shape", [-1]))


def from_safetensors(body: bytes) -> list[torch.Tensor]:
    """The embeddings of each image of a safetensors answer."""
    tensors = safetensors.torch.load(body)
    lengths = [1] * len(tensors["grid_thw"])
    pooled = safetensors_metadata(body)["pooling"] == "mean"
    rows = tensors["embeddings"].split(lengths if pooled else tensors["num_tokens"].tolist())
    return [row[0] for row in rows] if pooled else list(rows)


def safetensors_metadata(body: bytes) -> dict[str, str]:
    """The header of the file: eight bytes of length, then JSON."""
    length = int.from_bytes(body[:8], "little")
    metadata: dict[str, str] = json.loads(body[8 : 8 + length])["__metadata__"]
    return metadata


def from_npy(body: bytes) -> torch.Tensor:
    """The one array of an npy answer."""
    array = np.load(io.BytesIO(body), allow_pickle=False)
    return torch.from_numpy(array)


def from_vllm(body: bytes) -> list[torch.Tensor]:
    """The tokens of each content part. Fails unless it follows the rules that vLLM documents."""
    document = json.loads(body)
    parts = document["content"]
    assert len({tuple(sorted(part)) for part in parts}) == 1, "the parts of a message have the same members"
    return [_from_part(part, document["token_width"]) for part in parts]


def _from_part(part: dict[str, Any], token_width: int) -> torch.Tensor:
    assert set(part) == {"type", "uuid", "image_embeds"}
    assert part["type"] == "image_embeds"
    embeds = part["image_embeds"]
    assert set(embeds) == {"image_embeds", "image_grid_thw"}
    tokens = file_tensor(base64.b64decode(embeds["image_embeds"], validate=True))
    t, h, w = embeds["image_grid_thw"]
    assert all(isinstance(n, int) for n in (t, h, w))
    assert tokens.shape == (t * h * w // 4, token_width)
    return tokens


def file_tensor(data: bytes) -> torch.Tensor:
    """Loads a file of `.npy` or of `torch.save`, without running any code in it."""
    if data.startswith(b"\x93NUMPY"):
        return from_npy(data)
    tensor = torch.load(io.BytesIO(data), weights_only=True)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def error_of(response: httpx.Response) -> tuple[int, str, str | None]:
    """Status, code and param of an error. Fails unless the answer has the error body."""
    error = ErrorResponse.model_validate_json(response.content).error
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return response.status_code, error.code, error.param


def message_of(response: httpx.Response) -> str:
    return ErrorResponse.model_validate_json(response.content).error.message

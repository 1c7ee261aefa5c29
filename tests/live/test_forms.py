"""Every format of an answer holds the same vectors, to the bit where the dtype allows."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import simplejpeg
import skimage
import torch
from openai import OpenAI

from models import VisionEncoder
from tests.support.answers import from_json, from_npy, from_safetensors, from_vllm
from tests.support.app import encode_image

IMAGE = encode_image(200, 300, seed=7)
TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def post(server_url: str, accept: str = "*/*", **options: str) -> httpx.Response:
    headers = {"content-type": "image/png", "accept": accept}
    response = httpx.post(f"{server_url}/embed", params=options, content=IMAGE, headers=headers)
    return response.raise_for_status()


def with_openai(server_url: str, **arguments: Any) -> torch.Tensor:
    with OpenAI(base_url=f"{server_url}/v1", api_key="none") as client:
        text = base64.b64encode(IMAGE).decode()
        [entry] = client.embeddings.create(model="demo", input=[text], **arguments).data
    return torch.tensor(entry.embedding)


def test_a_pooled_vector_is_the_same_in_every_form(server_url: str) -> None:
    [vector] = from_json(post(server_url).content)
    assert vector.dtype == torch.float32
    others = [
        *from_json(post(server_url, encoding_format="base64").content),
        *from_safetensors(post(server_url, format="safetensors").content),
        *from_safetensors(post(server_url, "application/x-safetensors").content),
        from_npy(post(server_url, format="npy").content)[0],
        from_npy(post(server_url, "text/html, application/x-npy;q=0.5, */*;q=0.1").content)[0],
        with_openai(server_url),
        with_openai(server_url, encoding_format="float"),
    ]
    assert len(others) == 7
    for other in others:
        assert torch.equal(other, vector)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tokens_are_the_same_in_every_form(dtype: str, server_url: str) -> None:
    asked = {"pooling": "none", "deepstack": "true", "dtype": dtype}
    [tokens] = from_json(post(server_url, encoding_format="base64", **asked).content)
    assert tokens.dtype == TORCH_DTYPES[dtype]
    others = [
        *from_safetensors(post(server_url, format="safetensors", **asked).content),
        *from_vllm(post(server_url, format="vllm", dtype=dtype).content),
    ]
    if dtype == "float32":
        others += from_json(post(server_url, **asked).content)
        others += from_vllm(post(server_url, format="vllm").content)  # the encoder's own dtype
    if dtype != "bfloat16":
        others.append(from_npy(post(server_url, format="npy", **asked).content))
    assert len(others) >= 2
    for other in others:
        assert other.dtype == tokens.dtype
        assert torch.equal(other, tokens)


@pytest.mark.parametrize(
    ("options", "media_type"),
    [
        ({}, "application/json"),
        ({"format": "vllm"}, "application/json"),
        ({"format": "safetensors"}, "application/x-safetensors"),
        ({"format": "npy"}, "application/x-npy"),
    ],
)
def test_an_answer_says_its_type_and_length(
    options: dict[str, str], media_type: str, server_url: str
) -> None:
    response = post(server_url, **options)
    assert response.headers["content-type"] == media_type
    assert response.headers["content-length"] == str(len(response.content))
    assert response.headers["vary"] == "Accept"


@pytest.mark.parametrize("form", ["safetensors", "npy", "vllm"])
def test_a_large_answer_in_several_pieces_is_whole(form: str, server_url: str) -> None:
    image = encode_image(1024, 1024, format="JPEG")
    params = {"format": form, "pooling": "none", "deepstack": "true", "dtype": "float32"}
    response = httpx.post(
        f"{server_url}/embed", params=params, content=image, headers={"content-type": "image/jpeg"}
    )
    assert len(response.content) > 2**20
    read: dict[str, Callable[[bytes], torch.Tensor]] = {
        "safetensors": lambda body: from_safetensors(body)[0],
        "npy": from_npy,
        "vllm": lambda body: from_vllm(body)[0],
    }
    assert read[form](response.content).shape == (1024, 384)


def test_a_photograph_from_bytes_to_vector(server_url: str) -> None:
    photograph = (Path(skimage.__file__).parent / "data" / "rocket.jpg").read_bytes()
    response = httpx.post(f"{server_url}/embed", content=photograph, headers={"content-type": "image/jpeg"})
    assert response.status_code == 200
    [entry] = response.json()["data"]
    assert (entry["width"], entry["height"]) == (640, 427)
    assert entry["sha256"] == hashlib.sha256(photograph).hexdigest()
    encoder = VisionEncoder.from_pretrained("demo", device="cpu", dtype=torch.float32)
    [tokens] = encoder.encode([encoder.preprocess(simplejpeg.decode_jpeg(photograph, "RGB"))])
    mean = tokens[:, : encoder.hidden_size].mean(dim=0)
    assert len(entry["embedding"]) == encoder.hidden_size
    assert np.linalg.norm(entry["embedding"]) == pytest.approx(1, abs=1e-6)
    assert entry["embedding"] == pytest.approx((mean / mean.norm()).tolist(), abs=1e-5)

"""The official client, unchanged, against a running server."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any, cast

import httpx
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.support.app import encode_image

IMAGES = [encode_image(64 + 32 * n, 96, seed=n) for n in range(3)]
TEXTS = [base64.b64encode(image).decode() for image in IMAGES]


@pytest.fixture
def client(server_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def from_embed(server_url: str, image: bytes) -> list[float]:
    response = httpx.post(f"{server_url}/embed", content=image, headers={"content-type": "image/png"})
    vector: list[float] = response.raise_for_status().json()["data"][0]["embedding"]
    return vector


def equal(one: list[float], other: list[float]) -> bool:
    """The vectors are equal to the bit, in float32."""
    return np.array_equal(np.array(one, np.float32), np.array(other, np.float32))


def test_the_clients_own_base64_is_the_vector_of_embed(client: OpenAI, server_url: str) -> None:
    response = client.embeddings.create(model="demo", input=TEXTS[0])
    [entry] = response.data
    assert isinstance(entry.embedding, list)
    assert equal(entry.embedding, from_embed(server_url, IMAGES[0]))
    assert np.linalg.norm(entry.embedding) == pytest.approx(1, abs=1e-5)
    assert (response.model, response.object, entry.object) == ("demo", "list", "embedding")
    assert response.usage.prompt_tokens == response.usage.total_tokens > 0


def test_floats_equal_base64(client: OpenAI) -> None:
    floats = client.embeddings.create(model="demo", input=TEXTS[0], encoding_format="float")
    default = client.embeddings.create(model="demo", input=TEXTS[0])
    raw = client.embeddings.create(model="demo", input=TEXTS[0], encoding_format="base64")
    assert equal(floats.data[0].embedding, default.data[0].embedding)
    decoded = np.frombuffer(base64.b64decode(cast(str, raw.data[0].embedding), validate=True), "<f4")
    assert equal(floats.data[0].embedding, decoded.tolist())


@pytest.mark.parametrize(
    "items",
    [TEXTS, [{"image": text} for text in TEXTS], [f"data:image/png;base64,{text}" for text in TEXTS]],
    ids=["base64", "image items", "data URIs"],
)
def test_lists_come_back_in_order(items: Any, client: OpenAI, server_url: str) -> None:
    response = client.embeddings.create(model="demo", input=items)
    assert [entry.index for entry in response.data] == [0, 1, 2]
    for entry, image in zip(response.data, IMAGES, strict=True):
        np.testing.assert_allclose(entry.embedding, from_embed(server_url, image), atol=1e-5)


def test_text_is_refused_with_a_clear_message(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="demo", input=["A cat on a mat."])
    error = caught.value
    assert (error.status_code, error.code, error.param) == (400, "text_not_supported", "input[0]")
    assert error.type == "invalid_request_error"
    assert "images only" in error.message


def test_another_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="text-embedding-3-small", input=TEXTS[0])
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_dimensions_and_unknown_members(client: OpenAI) -> None:
    width = len(client.embeddings.create(model="demo", input=TEXTS[0]).data[0].embedding)
    client.embeddings.create(
        model="demo", input=TEXTS[0], dimensions=width, user="me", extra_body={"truncate": True}
    )
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="demo", input=TEXTS[0], dimensions=width - 1)
    assert caught.value.param == "dimensions"


def test_json_of_the_wrong_shape_is_400_and_not_422(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="demo", input=cast(Any, {"picture": 5}))
    assert (caught.value.code, caught.value.param) == ("invalid_request", "input[0]")


def test_a_broken_image_is_named(client: OpenAI) -> None:
    broken = base64.b64encode(IMAGES[1][:200]).decode()
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="demo", input=[TEXTS[0], broken])
    assert (caught.value.code, caught.value.param) == ("invalid_image", "input[1]")


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object) == ("demo", "model")
    assert client.models.retrieve("demo") == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


async def _create(server_url: str) -> list[float]:
    async with AsyncOpenAI(base_url=f"{server_url}/v1", api_key="none") as client:
        response = await client.embeddings.create(model="demo", input=TEXTS[0])
    return response.data[0].embedding


def test_the_asynchronous_client_works(server_url: str) -> None:
    assert equal(asyncio.run(_create(server_url)), from_embed(server_url, IMAGES[0]))

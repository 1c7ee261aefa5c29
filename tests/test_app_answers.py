"""Forms of answers, and the route in the shape of OpenAI."""

from __future__ import annotations

import base64

import httpx
import pytest

from service.config.settings import Settings
from service.routes.openapi import PIXEL
from service.routes.schemas import ModelCard, OpenAIResponse
from tests.support.answers import error_of, from_safetensors, from_vllm
from tests.support.app import (
    Service,
    encode_image,
    only,
)
from tests.support.app_requests import Serve


@pytest.mark.parametrize("form", ["safetensors", "npy", "vllm"])
def test_every_format_answers_several_images_or_refuses_them(form: str, service: Service) -> None:
    response = service.embed_form(encode_image(), encode_image(64, 64), query=f"?format={form}&pooling=none")
    if form == "npy":
        assert error_of(response) == (400, "option_conflict", "format")
        assert service.encoder.batches == []
        return
    read = from_safetensors if form == "safetensors" else from_vllm
    assert [len(tokens) for tokens in read(response.content)] == [6, 4]


def openai_embed(service: Service, document: object, **headers: str) -> httpx.Response:
    return service.request("POST", "/v1/embeddings?api-version=1", json=document, headers=headers)


def test_openai_route_has_its_own_shape_and_counts(service: Service) -> None:
    text = base64.b64encode(encode_image()).decode()
    response = openai_embed(service, {"model": "demo", "input": [text, {"image": text}]})
    body = OpenAIResponse.model_validate_json(response.content)
    assert [entry.index for entry in body.data] == [0, 1]
    assert (body.model, body.usage.prompt_tokens, body.usage.total_tokens) == ("demo", 12, 12)
    assert service.metric("requests_total", route="/v1/embeddings", status="200") == 1
    assert service.metric("request_duration_seconds_count", route="/v1/embeddings") == 1


@pytest.mark.parametrize(
    ("document", "headers", "expected"),
    [
        ({"input": "a cat"}, {}, (400, "text_not_supported", "input[0]")),
        ({"input": [PIXEL, 5]}, {}, (400, "text_not_supported", "input[1]")),
        ([], {}, (400, "invalid_request", None)),
        ({}, {}, (400, "invalid_request", "input")),
        ({"input": []}, {}, (400, "empty_input", "input")),
        ({"input": [PIXEL, {"image": "data:,x"}]}, {}, (400, "invalid_image", "input[1]")),
        ({"input": [PIXEL] * 33}, {}, (413, "too_many_images", "input")),
        ({"input": PIXEL, "model": "gpt"}, {}, (404, "model_not_found", "model")),
        ({"input": PIXEL, "dimensions": 3}, {}, (400, "invalid_option", "dimensions")),
        ({"input": PIXEL, "encoding_format": "hex"}, {}, (400, "invalid_option", "encoding_format")),
        ({"input": PIXEL}, {"accept": "application/x-npy"}, (406, "not_acceptable", None)),
        ({"input": PIXEL}, {"accept": "," * 5000}, (431, "headers_too_large", None)),
        ({"input": PIXEL}, {"content-type": "a" * 1100}, (431, "headers_too_large", None)),
        ({"input": PIXEL}, {"content-type": "text/plain"}, (415, "unsupported_content_type", None)),
    ],
)
def test_refusals_of_the_openai_route(
    document: object, headers: dict[str, str], expected: tuple[int, str, str | None], service: Service
) -> None:
    assert error_of(openai_embed(service, document, **headers)) == expected
    assert service.encoder.batches == []
    assert service.metric("requests_total", route="/v1/embeddings", status=str(expected[0])) == 1


def test_the_openai_route_is_closed_while_the_server_is_not_ready(service: Service) -> None:
    service.engine.drain()
    assert error_of(openai_embed(service, {"input": PIXEL})) == (503, "draining", None)


def test_a_model_is_found_by_its_name_with_its_slash(serve: Serve, settings: Settings) -> None:
    service = serve(only(settings, served_model_name="org/mine"))
    for path in ("/v1/models/org/mine", "/v1/models/org%2Fmine"):
        assert ModelCard.model_validate_json(service.get(path).content).id == "org/mine"
    for path in ("/v1/models/mine", "/v1/models/", "/v1/models/org/mine/"):
        assert error_of(service.get(path)) == (404, "model_not_found", "model")
    assert service.metric("requests_total", route="/v1/models/{model_id:path}", status="200") == 2

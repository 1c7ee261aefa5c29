from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from service.errors import ApiError, UnsupportedMedia
from service.fetching.image_urls import ImageUrl
from service.intake.body import openai_reader, read_body
from service.intake.content_type import parse_content_type
from service.intake.embed_body import EmbedBody
from service.intake.openai_body import ServedModel
from service.routes.openapi import PIXEL
from tests.support.bodies import LIMITS, T, Ts, run_inline, stream

SERVED = ServedModel("org/model", hidden_size=128)
IMAGE = base64.b64decode(PIXEL)


def read(document: Any, content_type: str | None = "application/json") -> EmbedBody:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    reader = openai_reader(parse_content_type(content_type), LIMITS, SERVED)
    return asyncio.run(read_body(reader, stream([body]), LIMITS, run_inline))


def refusal(document: Any) -> tuple[int, str, str | None]:
    with pytest.raises(ApiError) as caught:
        read(document)
    caught.value.message.encode()
    return caught.value.status, caught.value.code, caught.value.param


@pytest.mark.parametrize(
    "item",
    [
        PIXEL,
        f"  {PIXEL[:40]}\n{PIXEL[40:]}\n",
        PIXEL.replace("+", "-").replace("/", "_").rstrip("="),
        f"data:image/png;base64,{PIXEL}",
        f"DATA:;base64,{PIXEL}",
        {"image": PIXEL},
        {"image": f"data:image/png;base64,{PIXEL}"},
        {"data": PIXEL},
        {"url": f"data:image/png;base64,{PIXEL}"},
    ],
)
def test_an_image_may_be_written_in_many_ways(item: Any) -> None:
    assert read({"model": "org/model", "input": item}).images == (IMAGE,)
    assert read({"model": "org/model", "input": [item, item]}).images == (IMAGE, IMAGE)


def test_members_that_are_not_known_are_ignored() -> None:
    document = {"input": PIXEL, "user": "me", "input_type": None, "truncate": {"deep": [1, 2.5]}}
    assert read(document) == EmbedBody((IMAGE,), {})


def test_the_encoding_is_an_option_and_null_is_none() -> None:
    assert read({"input": PIXEL, "encoding_format": "base64"}).options == {"encoding_format": "base64"}
    nulls = {"input": PIXEL, "encoding_format": None, "model": None, "dimensions": None}
    assert read(nulls) == EmbedBody((IMAGE,), {})


@pytest.mark.parametrize(
    "text",
    [
        "A cat on a mat.",
        "cat",
        "photograph",
        "hello world",
        "Note: this is text",
        "Straße",
        "mailto:me@example.org",
        "12345678",
        PIXEL[:-8] + "!" * 8,
    ],
)
def test_text_is_refused_as_such(text: str) -> None:
    assert refusal({"input": text}) == (400, "text_not_supported", "images[0]")
    assert refusal({"input": [PIXEL, text]}) == (400, "text_not_supported", "images[1]")


@pytest.mark.parametrize(
    "tokens", [[1, 2], [[1, 2], [3]], [{"text": "cat"}], [{"text": "cat", "image": PIXEL}]]
)
def test_tokens_and_text_items_are_refused_as_text(tokens: Any) -> None:
    assert refusal({"input": tokens}) == (400, "text_not_supported", "images[0]")


def test_the_refusal_of_text_says_what_to_send() -> None:
    with pytest.raises(ApiError, match=r'embeds images only.*base64.*data: URI.*\{"image"'):
        read({"input": "a cat"})


def test_what_is_meant_as_an_image_keeps_its_own_error() -> None:
    assert refusal({"input": {"image": "cat!"}}) == (400, "invalid_base64", "images[0]")
    assert refusal({"input": "data:image/png;base64,!"}) == (400, "invalid_base64", "images[0]")
    assert refusal({"input": {"image": "ftp://example.org/a.jpg"}})[1:] == ("url_not_allowed", "images[0]")
    assert refusal({"input": "A" * 1336}) == (413, "image_too_large", "images[0]")
    assert read({"input": base64.b64encode(b"%PDF-1.7").decode()}).images == (b"%PDF-1.7",)


def test_a_url_is_left_to_be_fetched() -> None:
    url = ImageUrl("https://example.org/a.jpg")
    for item in (url.url, {"image": url.url}, {"url": url.url}):
        assert read({"input": item}).images == (url,)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ([], (422, "invalid_request", None)),
        ("x", (422, "invalid_request", None)),
        ({}, (422, "invalid_request", "input")),
        ({"input": None}, (422, "invalid_request", "images[0]")),
        ({"input": {"image": 5}}, (422, "invalid_request", "images[0]")),
        ({"input": {"image": PIXEL, "detail": "low"}}, (422, "invalid_request", "images[0]")),
        ({"input": {"picture": PIXEL}}, (422, "invalid_request", "images[0]")),
        ({"input": []}, (400, "empty_input", "images")),
        ({"input": ""}, (400, "empty_input", "images[0]")),
        ({"input": [PIXEL, " "]}, (400, "empty_input", "images[1]")),
        ({"input": [PIXEL] * 4}, (413, "too_many_images", "images")),
        ({"input": PIXEL, "model": "gpt"}, (404, "model_not_found", "model")),
        ({"input": "text", "model": ""}, (404, "model_not_found", "model")),
        ({"input": PIXEL, "model": 5}, (422, "invalid_request", "model")),
        ({"input": PIXEL, "encoding_format": 5}, (422, "invalid_request", "encoding_format")),
        ({"input": PIXEL, "dimensions": 64}, (400, "invalid_option", "dimensions")),
        (b'{"input": "x", "dimensions": 1%s}' % (b"0" * 5000), (400, "invalid_option", "dimensions")),
        ({"input": PIXEL, "dimensions": "128"}, (400, "invalid_option", "dimensions")),
        ({"input": PIXEL, "dimensions": [128]}, (400, "invalid_option", "dimensions")),
        (b"{", (400, "invalid_json", None)),
        (b'{"input": "x", "input": "y"}', (400, "invalid_json", None)),
        (b"", (400, "empty_input", None)),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(document: Any, expected: tuple[int, str, str]) -> None:
    assert refusal(document) == expected


def test_the_vectors_own_dimensions_are_accepted() -> None:
    assert read({"input": PIXEL, "dimensions": 128}).images == (IMAGE,)


@pytest.mark.parametrize(
    "content_type", [None, "", "image/png", "multipart/form-data; boundary=x", "text/json"]
)
def test_nothing_but_json_is_taken(content_type: str | None) -> None:
    with pytest.raises(UnsupportedMedia, match="application/json"):
        read({"input": PIXEL}, content_type)


def test_a_large_document_is_parsed_off_the_event_loop() -> None:
    calls = []

    async def run_blocking(fn: Callable[[*Ts], T], /, *args: *Ts) -> T:
        calls.append(fn.__name__)
        return fn(*args)

    body = json.dumps({"input": PIXEL, "user": "x" * 2**17}).encode()
    reader = openai_reader(parse_content_type("application/json"), LIMITS, SERVED)
    asyncio.run(read_body(reader, stream([body]), LIMITS, run_blocking))
    assert calls == ["parse_openai_body"]

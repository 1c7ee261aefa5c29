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
        {"image": PIXEL, "url": None},
        {"image": None, "data": PIXEL},
    ],
)
def test_every_way_to_write_an_image_is_accepted(item: Any) -> None:
    assert read({"model": "org/model", "input": item}).images == (IMAGE,)
    assert read({"model": "org/model", "input": [item, item]}).images == (IMAGE, IMAGE)


def test_unknown_members_are_ignored() -> None:
    document = {"input": PIXEL, "user": "me", "input_type": None, "truncate": {"deep": [1, 2.5]}}
    assert read(document) == EmbedBody((IMAGE,), {})


def test_encoding_format_is_read_and_null_counts_as_missing() -> None:
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
def test_text_is_refused_as_text_not_supported(text: str) -> None:
    assert refusal({"input": text}) == (400, "text_not_supported", "images[0]")
    assert refusal({"input": [PIXEL, text]}) == (400, "text_not_supported", "images[1]")


@pytest.mark.parametrize(
    "tokens", [[1, 2], [[1, 2], [3]], [{"text": "cat"}], [{"text": "cat", "image": PIXEL}]]
)
def test_tokens_and_text_items_are_refused_as_text(tokens: Any) -> None:
    assert refusal({"input": tokens}) == (400, "text_not_supported", "images[0]")


def test_error_for_text_says_what_to_send() -> None:
    with pytest.raises(
        ApiError, match=r'embeds images only; send each image.*\{"image": "<base64, data: URI or URL>"'
    ):
        read({"input": "a cat"})


CHAT_ITEMS = {
    "a part of a chat message": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
    "a part without a type": {"image_url": {"url": "https://example.org/a.jpg", "detail": "low"}},
    "a part of OpenAI's Responses API": {"type": "input_image", "image_url": "https://example.org/a.jpg"},
    "a part of Anthropic's API": {"type": "image", "source": {"type": "base64", "data": PIXEL}},
    "a message": {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]},
}


@pytest.mark.parametrize("name", CHAT_ITEMS)
def test_error_for_a_chat_shape_says_what_to_send(name: str) -> None:
    assert refusal({"input": [PIXEL, CHAT_ITEMS[name]]}) == (422, "invalid_request", "images[1]")
    with pytest.raises(
        ApiError, match=r'chat request.*send each image of input as \{"image": "<base64, data'
    ):
        read({"input": CHAT_ITEMS[name]})


def test_error_for_chat_messages_says_what_to_send() -> None:
    chat = {"model": "org/model", "messages": [CHAT_ITEMS["a message"]]}
    assert refusal(chat) == (422, "invalid_request", "messages")
    with pytest.raises(ApiError, match=r'no chat messages; send each image of input as \{"image"'):
        read(chat)
    assert read({**chat, "input": PIXEL}).images == (IMAGE,)  # messages is ignored


def test_malformed_image_is_not_refused_as_text() -> None:
    assert refusal({"input": {"image": "cat!"}}) == (400, "invalid_base64", "images[0]")
    assert refusal({"input": "data:image/png;base64,!"}) == (400, "invalid_base64", "images[0]")
    assert refusal({"input": {"image": "ftp://example.org/a.jpg"}})[1:] == ("url_not_allowed", "images[0]")
    assert refusal({"input": "A" * 1336}) == (413, "image_too_large", "images[0]")
    assert read({"input": base64.b64encode(b"%PDF-1.7").decode()}).images == (b"%PDF-1.7",)


def test_http_url_is_returned_as_a_url() -> None:
    url = ImageUrl("https://example.org/a.jpg")
    for item in (url.url, {"image": url.url}, {"url": url.url}):
        assert read({"input": item}).images == (url,)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ([], (422, "invalid_request", None)),
        ("x", (422, "invalid_request", None)),
        ({}, (422, "invalid_request", "input")),
        ({"input": None}, (422, "invalid_request", "input")),
        ({"input": [None]}, (422, "invalid_request", "images[0]")),
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
def test_error_for_a_bad_document_names_the_member(document: Any, expected: tuple[int, str, str]) -> None:
    assert refusal(document) == expected


def test_dimensions_may_be_the_length_of_the_vectors() -> None:
    assert read({"input": PIXEL, "dimensions": 128}).images == (IMAGE,)


@pytest.mark.parametrize(
    "content_type", [None, "", "image/png", "multipart/form-data; boundary=x", "text/json"]
)
def test_other_content_types_than_json_are_refused(content_type: str | None) -> None:
    with pytest.raises(UnsupportedMedia, match="application/json"):
        read({"input": PIXEL}, content_type)


def test_large_document_is_parsed_off_the_event_loop() -> None:
    calls = []

    async def run_blocking(fn: Callable[[*Ts], T], /, *args: *Ts) -> T:
        calls.append(fn.__name__)
        return fn(*args)

    body = json.dumps({"input": PIXEL, "user": "x" * 2**17}).encode()
    reader = openai_reader(parse_content_type("application/json"), LIMITS, SERVED)
    asyncio.run(read_body(reader, stream([body]), LIMITS, run_blocking))
    assert calls == ["parse_openai_body"]

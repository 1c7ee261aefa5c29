"""Chats go through the server to an LLM server, over real sockets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.config.settings import Settings
from tests.support.app import encode_image
from tests.support.chats import CHAT, Door, chat, code_of, image_part, url
from tests.support.llm_server import LlmServer, answer
from tests.support.serving import Served
from tests.support.waiting import eventually

CHATS = [CHAT, "/tokenize", "/pooling", "/v1/embeddings"]


@pytest.mark.parametrize("path", [*CHATS, "/v1/responses"])
def test_body_without_images_arrives_byte_for_byte(door: Served, llm: LlmServer, path: str) -> None:
    body = (
        rb' {"messages" : [{"content": "\u0022 \ud800 \u00e9 image"}], "n":1.0, "n":1e400, '
        rb'"big":123456789012345678901234567890} '
    )
    response = httpx.post(url(door, path) + "?a=%20b&a=", content=body)
    assert (response.status_code, response.content) == (200, b'{"ok":true}')
    asked = llm.last()
    assert asked.line == f"POST {path}?a=%20b&a= HTTP/1.1"
    assert asked.body == body
    assert asked.header("content-length") == [str(len(body))]


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[" * 10_000_000, b"null", b"text", b"\xef\xbb\xbf{}"])
def test_llm_server_says_what_is_wrong_with_other_bodies(door: Served, llm: LlmServer, body: bytes) -> None:
    llm.script = answer(400, b"wrong")
    response = httpx.post(url(door), content=body, timeout=30)
    assert (response.status_code, response.content) == (400, b"wrong")
    assert llm.last().body == body


@pytest.mark.parametrize("path", CHATS)
def test_images_are_in_the_store_when_the_chat_arrives(
    door: Served, llm: LlmServer, with_store: Settings, path: str
) -> None:
    folder = with_store.handoff_dir
    assert folder is not None
    found: list[Path] = []
    ok = answer()

    async def script(asked: Any) -> None:
        found.extend(folder.glob("*.safetensors"))
        await ok(asked)

    llm.script = script
    images = [encode_image(64, 96, seed=1), encode_image(96, 64, seed=2), encode_image(64, 96, seed=1)]
    text = {"type": "text", "text": "image"}
    response = httpx.post(url(door, path), json=chat(*map(image_part, images), text))
    assert response.status_code == 200
    *parts, last = json.loads(llm.last().body)["messages"][0]["content"]
    assert last == text
    assert [part["image_embeds"] for part in parts] == [
        {"image_grid_thw": [1, h, w]} for h, w in ((4, 6), (6, 4), (4, 6))
    ]
    assert {part["uuid"] for part in parts} == {file.stem for file in found}
    assert parts[0] == parts[2]
    assert {part["type"] for part in parts} == {"image_embeds"}


def test_image_that_was_seen_before_is_not_encoded_again(door: Served, llm: LlmServer) -> None:
    body = chat(image_part(encode_image()))
    first, second = httpx.post(url(door), json=body), httpx.post(url(door), json=body)
    assert "cache;desc=hit" not in first.headers["server-timing"]
    assert second.headers["server-timing"].startswith("cache;desc=hit, read;dur=")
    assert "llm;dur=" in second.headers["server-timing"]
    assert llm.asked[0].body == llm.asked[1].body
    assert door.scrape().total("images_total") == 1


def test_embeddings_without_messages_are_this_servers(door: Served, llm: LlmServer) -> None:
    image = image_part(encode_image())["image_url"]["url"]
    for body in ({"input": image}, {"input": [{"image": image}], "user": '"messages"', "messages": None}):
        response = httpx.post(url(door, "/v1/embeddings"), json=body)
        assert response.status_code == 200
        assert len(response.json()["data"][0]["embedding"]) == 4
        assert "read;dur=" in response.headers["server-timing"]
    for other in (b'{"messages":[', b"{}", b'{"input":"text", "a":"\\"messages\\""}'):
        response = httpx.post(
            url(door, "/v1/embeddings"), content=other, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400
        assert response.json()["error"]["param"] in (None, "input", "input[0]")
    assert llm.asked == []


def test_models_are_the_llm_servers(door: Served, llm: LlmServer) -> None:
    response = httpx.get(url(door, "/v1/models?a=1"), headers={"x-a": "b"})
    assert (response.status_code, response.content) == (200, b'{"ok":true}')
    asked = llm.last()
    assert asked.line == "GET /v1/models?a=1 HTTP/1.1"
    assert asked.header("x-a") == ["b"]
    assert asked.header("content-length") == asked.header("transfer-encoding") == []
    assert httpx.head(url(door, "/v1/models")).status_code == 200
    assert llm.last().line == "GET /v1/models HTTP/1.1"


def test_path_of_the_llm_servers_url_comes_first(open_door: Door, llm: LlmServer) -> None:
    door = open_door(llm_url=llm.url + "/team/")
    httpx.post(url(door), json=chat("hi"))
    assert llm.last().line == f"POST /team{CHAT} HTTP/1.1"


def test_images_of_responses_are_refused(door: Served, llm: LlmServer) -> None:
    part = {"type": "input_image", "image_url": "data:,x"}
    response = httpx.post(url(door, "/v1/responses"), json={"input": [{"role": "user", "content": [part]}]})
    assert code_of(response) == (400, "invalid_option")
    assert llm.asked == []


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (chat(image_part(b"no image")), 400, "invalid_image"),
        (chat(image_part(b"")), 400, "empty_input"),
        (chat({"image_url": "https://images.test/a.png"}), 400, "url_not_allowed"),
        (chat({"image_url": "ftp://images.test/a.png"}), 400, "url_not_allowed"),
        (chat(*[image_part(encode_image())] * 33), 413, "too_many_images"),
        (
            chat(image_part(encode_image())) | {"mm_processor_kwargs": {"max_pixels": 1}},
            400,
            "option_conflict",
        ),
    ],
)
def test_image_that_cannot_be_embedded_ends_the_request_here(
    door: Served, llm: LlmServer, body: object, status: int, code: str
) -> None:
    response = httpx.post(url(door), json=body)
    assert code_of(response) == (status, code)
    assert response.headers["content-type"] == "application/json"
    assert llm.asked == []


def test_limits_are_those_of_all_routes(open_door: Door, llm: LlmServer) -> None:
    door = open_door(max_body_bytes=1000, max_image_bytes=1000, max_inflight_bytes=1000)
    assert code_of(httpx.post(url(door), content=b"x" * 1001)) == (413, "body_too_large")
    assert code_of(httpx.post(url(door), content=b"")) == (400, "empty_input")
    gzip = {"content-encoding": "gzip"}
    assert code_of(httpx.post(url(door), content=b"x", headers=gzip)) == (415, "unsupported_content_type")
    assert code_of(httpx.post(url(door, "/v1/embeddings"), content=b"x" * 1001)) == (413, "body_too_large")
    assert code_of(httpx.get(url(door))) == (405, "method_not_allowed")
    assert llm.asked == []
    assert door.scrape().total("inflight_bytes") == 0


def test_routes_exist_only_with_an_llm_server(open_door: Door) -> None:
    door = open_door(llm_url=None)
    for path in (CHAT, "/tokenize", "/pooling", "/v1/responses"):
        assert code_of(httpx.post(url(door, path), json={})) == (404, "not_found")
    assert httpx.get(url(door, "/v1/models")).json()["data"][0]["id"] == "demo"
    assert CHAT not in httpx.get(url(door, "/openapi.json")).json()["paths"]


def test_routes_are_described(door: Served) -> None:
    paths = httpx.get(url(door, "/openapi.json")).json()["paths"]
    for path in (*CHATS, "/v1/responses"):
        assert {"502", "503", "504"} <= paths[path]["post"]["responses"].keys()
    assert "LLM server" in paths["/v1/models"]["get"]["summary"]


def test_keep_alive_connection_is_used_again(door: Served, llm: LlmServer) -> None:
    for _ in range(5):
        httpx.post(url(door), json=chat("hi"))
    assert llm.num_connections == 1


def test_requests_are_counted_by_route_and_status(door: Served, llm: LlmServer) -> None:
    for status in (200, 429, 418):
        llm.script = answer(status)
        httpx.post(url(door), json=chat("hi"))
    for label in ("200", "429", "other"):
        eventually(lambda: door.scrape().total("llm_requests_total", f'status="{label}"') == 1)  # noqa: B023
        eventually(lambda: door.scrape().total("requests_total", f'route="{CHAT}",status="{label}"') == 1)  # noqa: B023
    assert door.scrape().total("stage_duration_seconds_count", 'stage="llm"') == 3

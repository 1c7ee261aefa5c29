"""Which headers reach the LLM server, and which come back."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from service.chat.passed_headers import answer_headers, request_headers
from tests.support.chats import CHAT, Door, chat, code_of, url
from tests.support.llm_server import LlmServer, answer
from tests.support.serving import Served


def test_headers_of_one_connection_stay_behind(door: Served, llm: LlmServer) -> None:
    lines = [
        f"POST {CHAT} HTTP/1.1",
        "Host: door.test",
        "Connection: X-Once, close",
        "Keep-Alive: timeout=5",
        "X-Once: 1",
        "X-Stays: a",
        "X-Stays: b",
        "TE: trailers",
        "Trailer: X-T",
        "Upgrade: h2c",
        "Proxy-Authorization: Basic x",
        "Proxy-Connection: keep-alive",
        "Expect: 100-continue",
        "Accept-Encoding: gzip, br",
        "Cookie: a=b",
        "Transfer-Encoding: chunked",
    ]
    body = b"2\r\n{}\r\n0\r\nX-T: 1\r\n\r\n"
    with socket.create_connection(("127.0.0.1", door.port), timeout=20) as client:
        client.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        received = b""
        while b'{"ok":true}' not in received:
            received += client.recv(65536)
    assert received.startswith(b"HTTP/1.1 100 Continue")
    asked = llm.last()
    assert asked.body == b"{}"
    assert sorted(asked.headers) == sorted(
        [
            ("host", f"127.0.0.1:{llm.port}"),
            ("x-stays", "a"),
            ("x-stays", "b"),
            ("cookie", "a=b"),
            ("accept-encoding", "identity"),
            ("content-length", "2"),
            ("x-request-id", asked.header("x-request-id")[0]),
        ]
    )


def test_request_id_goes_on(door: Served, llm: LlmServer) -> None:
    response = httpx.post(url(door), json=chat("hi"), headers={"x-request-id": "mine"})
    assert llm.last().header("x-request-id") == ["mine"]
    assert response.headers.get_list("x-request-id") == ["mine"]
    response = httpx.post(url(door), json=chat("hi"))
    assert llm.last().header("x-request-id") == [response.headers["x-request-id"]]


def test_headers_of_the_answer_come_back_once(door: Served, llm: LlmServer) -> None:
    llm.script = answer(
        429,
        b"busy",
        *("Content-Type: text/x", "Retry-After: 3", "X-Request-Id: theirs", "Cache-Control: max-age=5"),
        *("Server: uvicorn", "Date: then", "Set-Cookie: a=1", "Set-Cookie: b=2", "X-Once: 1"),
        *("Connection: x-once", "Keep-Alive: timeout=5", "Access-Control-Allow-Origin: *", "Vary: Origin"),
    )
    response = httpx.post(url(door), json=chat("hi"))
    assert (response.status_code, response.content) == (429, b"busy")
    headers = response.headers
    assert headers["content-type"] == "text/x"
    assert headers["retry-after"] == "3"
    assert headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert headers.get_list("cache-control") == ["no-store"]
    assert headers.get_list("vary") == ["Accept"]
    assert len(headers.get_list("x-request-id")) == len(headers.get_list("date")) == 1
    assert headers["date"] != "then"
    assert not {"server", "x-once", "keep-alive", "connection", "access-control-allow-origin"} & set(headers)


def test_cors_is_that_of_all_routes(open_door: Door, llm: LlmServer) -> None:
    door = open_door(cors_allow_origins="https://page.test")
    llm.script = answer(200, b"{}", "Access-Control-Allow-Origin: https://other.test")
    origin = {"origin": "https://page.test"}
    response = httpx.post(url(door), json=chat("hi"), headers=origin)
    assert response.headers.get_list("access-control-allow-origin") == ["https://page.test"]
    asking = origin | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-stainless-os",
    }
    preflight = httpx.options(url(door), headers=asking)
    assert preflight.headers["access-control-allow-origin"] == "https://page.test"
    assert len(llm.asked) == 1


KEY = {"authorization": "Bearer sk-client"}


def test_clients_key_is_the_llm_servers_if_there_are_no_keys_here(door: Served, llm: LlmServer) -> None:
    httpx.post(url(door), json=chat("hi"), headers=KEY)
    assert llm.last().header("authorization") == ["Bearer sk-client"]


def test_key_of_this_server_is_needed_and_stays_here(open_door: Door, llm: LlmServer) -> None:
    door = open_door(api_keys="sk-client")
    assert code_of(httpx.post(url(door), json=chat("hi"))) == (401, "invalid_api_key")
    assert code_of(httpx.get(url(door, "/v1/models"))) == (401, "invalid_api_key")
    assert llm.asked == []
    assert httpx.post(url(door), json=chat("hi"), headers=KEY).status_code == 200
    assert httpx.get(url(door, "/v1/models"), headers=KEY).status_code == 200
    assert [asked.header("authorization") for asked in llm.asked] == [[], []]


@pytest.mark.parametrize("keys", ["sk-client", None])
def test_llm_servers_key_takes_the_place_of_the_clients(
    open_door: Door, llm: LlmServer, tmp_path: Path, keys: str | None
) -> None:
    file = tmp_path / "key"
    file.write_text("sk-llm\n")
    door = open_door(llm_api_key_file=file, **({} if keys is None else {"api_keys": keys}))
    httpx.post(url(door), json=chat("hi"), headers=KEY)
    httpx.get(url(door, "/v1/models"), headers=KEY)
    assert [asked.header("authorization") for asked in llm.asked] == [["Bearer sk-llm"]] * 2


@pytest.mark.parametrize(
    "line",
    [f"POST {CHAT} HTTP/1.1\r\nX-A: \x01", f"POST {CHAT}?\x80 HTTP/1.1", f"POST {CHAT}?a=\xe9 HTTP/1.1"],
)
def test_characters_that_are_not_http_are_refused(door: Served, llm: LlmServer, line: str) -> None:
    head = f"{line.replace('CHAT', CHAT)}\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", door.port), timeout=20) as client:
        client.sendall(head.encode("latin-1") + b"{}")
        received = b""
        while chunk := client.recv(65536):
            received += chunk
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"invalid_http"' in received
    assert llm.asked == []


def test_connection_may_not_name_headers_of_this_server_away() -> None:
    given = [(b"Connection", b"x-request-id, Authorization"), (b"Authorization", b"Bearer x"), (b"A", b"b")]
    sent = request_headers(given, "id", passes_authorization=True)
    assert sent == [(b"a", b"b"), (b"accept-encoding", b"identity"), (b"x-request-id", b"id")]
    assert answer_headers([(b"Connection", b"X-A"), (b"x-a", b"1"), (b"X-B", b"2")]) == [(b"x-b", b"2")]

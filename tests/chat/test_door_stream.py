"""Answers of the LLM server while they come: streamed, given up, broken off, cut off."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from models import EncodeItem
from tests.support.app import FakeEncoder, encode_image
from tests.support.chats import CHAT, Door, chat, code_of, image_part, url
from tests.support.llm_server import Asked, LlmServer, answer
from tests.support.serving import Served
from tests.support.waiting import eventually

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
HANGS = 60.0  # seconds, longer than any test


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def hang(asked: Asked) -> None:
    await asyncio.sleep(HANGS)


async def hang_in_the_stream(asked: Asked) -> None:
    asked.write(HEAD + chunk(b"data: 1\n\n"))
    await hang(asked)


class Steps:
    """Streams one piece at each call of `go`."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces
        self._allowed = threading.Semaphore(0)

    def go(self) -> None:
        self._allowed.release()

    async def __call__(self, asked: Asked) -> None:
        asked.write(HEAD)
        for piece in self._pieces:
            while not self._allowed.acquire(blocking=False):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            asked.write(chunk(piece))
        asked.write(END)


def counted(door: Served, outcome: str) -> float:
    return door.scrape().total("llm_requests_total", f'status="{outcome}"')


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=20) as client:
        yield client


def test_each_piece_is_there_before_the_next_is_sent(
    door: Served, llm: LlmServer, client: httpx.Client
) -> None:
    pieces = [b"data: 1\n\n", b"data: \xff\n\n", b"data: [DONE]\n\n"]
    llm.script = steps = Steps(*pieces)
    with client.stream("POST", url(door), json=chat("hi")) as response:
        assert response.headers["content-type"] == "text/event-stream"
        received = response.iter_raw()
        for piece in pieces:
            steps.go()
            assert next(received) == piece
        assert list(received) == []
    eventually(lambda: counted(door, "200") == 1)
    llm.script = answer()
    assert client.post(url(door), json=chat("hi")).status_code == 200
    assert llm.num_connections == 1


@pytest.mark.parametrize("script", [hang, hang_in_the_stream])
def test_caller_who_leaves_ends_the_request_upstream(
    door: Served, llm: LlmServer, script: Any, client: httpx.Client
) -> None:
    llm.script = script
    body = b'{"messages":[]}'
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", door.port), timeout=20) as leaving:
        leaving.sendall(head + body)
        asked = llm.last()
        if script is hang_in_the_stream:
            assert leaving.recv(100)
    started_at = time.perf_counter()
    assert asked.has_left.wait(10)
    assert time.perf_counter() - started_at < 1
    eventually(lambda: counted(door, "abandoned") == 1)
    eventually(lambda: door.engine.num_accepted == 0)
    assert door.scrape().total("requests_total", 'status="499"') == 1
    assert door.scrape().total("inflight_bytes") == 0


def test_caller_who_leaves_at_the_mark_of_the_end_has_got_everything(
    door: Served, llm: LlmServer, caplog: pytest.LogCaptureFixture
) -> None:
    llm.script = steps = Steps(b"data: 1\n\n", b"data: [DONE]\n\n", b"never sent")
    with httpx.Client(timeout=20) as leaving, leaving.stream("POST", url(door), json=chat("hi")) as response:
        received = response.iter_raw()
        for _ in range(2):
            steps.go()
            next(received)
    eventually(lambda: counted(door, "200") == 1)
    assert llm.last().has_left.wait(10)
    eventually(lambda: door.scrape().total("requests_total", f'route="{CHAT}",status="200"') == 1)
    assert [record.message for record in caplog.records if "the caller left" in record.message] == []


def test_caller_who_leaves_while_images_are_encoded_asks_nothing(
    open_door: Door, llm: LlmServer, gate: threading.Event
) -> None:
    def wait(items: Sequence[EncodeItem]) -> None:
        gate.wait(20)

    door = open_door(FakeEncoder(wait))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url(door), json=chat(image_part(encode_image())), timeout=0.5)
    eventually(lambda: door.scrape().total("requests_total", 'status="499"') == 1)
    gate.set()
    eventually(lambda: door.engine.is_idle)
    assert llm.asked == []
    assert sum(counted(door, outcome) for outcome in ("abandoned", "200")) == 0


def test_llm_server_that_is_down_is_unreachable(door: Served, llm: LlmServer, client: httpx.Client) -> None:
    llm.__exit__()
    for response in (client.post(url(door), json=chat("hi")), client.get(url(door, "/v1/models"))):
        assert code_of(response) == (502, "llm_unreachable")
    assert counted(door, "unreachable") == 2
    assert door.scrape().total("errors_total", 'code="llm_unreachable"') == 2


async def close(asked: Asked) -> None:
    asked.close()


async def close_in_the_head(asked: Asked) -> None:
    asked.write(b"HTTP/1.1 200 OK\r\ncontent-")
    asked.close()


async def no_http(asked: Asked) -> None:
    asked.write(b"SSH-2.0\r\n\r\n")


async def switch(asked: Asked) -> None:
    asked.write(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n")


@pytest.mark.parametrize("script", [close, close_in_the_head, no_http, answer(999), answer(600), switch])
def test_connection_that_ends_before_an_answer_is_not_tried_again(
    door: Served, llm: LlmServer, client: httpx.Client, script: Any
) -> None:
    assert client.post(url(door), json=chat("hi")).status_code == 200
    llm.script = script
    assert code_of(client.post(url(door), json=chat("hi"))) == (502, "llm_unreachable")
    assert len(llm.asked) == 2


def test_idle_connection_that_was_closed_is_replaced(
    door: Served, llm: LlmServer, client: httpx.Client
) -> None:
    ok = answer()

    async def answer_and_close(asked: Asked) -> None:
        await ok(asked)
        asked.close()

    llm.script = answer_and_close
    for _ in range(3):
        assert client.post(url(door), json=chat("hi")).status_code == 200
        time.sleep(0.05)
    assert len(llm.asked) == llm.num_connections == 3


def test_redirect_is_passed_on(door: Served, llm: LlmServer, client: httpx.Client) -> None:
    llm.script = answer(307, b"", "Location: http://elsewhere.test/")
    response = client.post(url(door), json=chat("hi"))
    assert (response.status_code, response.headers["location"]) == (307, "http://elsewhere.test/")
    assert len(llm.asked) == 1


def test_answer_before_the_body_was_read_is_passed_on(open_door: Door, llm: LlmServer) -> None:
    door = open_door()
    llm.refuses_bodies = True
    response = httpx.post(url(door), content=b'{"a":"' + b"x" * 2**24 + b'"}', timeout=20)
    assert response.status_code == 413


def test_silence_before_the_answer_is_a_timeout(open_door: Door, llm: LlmServer) -> None:
    door = open_door(llm_timeout_s=0.3)
    llm.script = hang
    assert code_of(httpx.post(url(door), json=chat("hi"))) == (504, "llm_timeout")
    assert llm.last().has_left.wait(10)
    assert counted(door, "timeout") == 1
    assert len(llm.asked) == 1


async def break_off(asked: Asked) -> None:
    asked.write(HEAD + chunk(b"data: 1\n\n"))
    asked.close()


async def break_off_whole(asked: Asked) -> None:
    asked.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\ndata: 1\n\n")
    asked.close()


@pytest.mark.parametrize(
    ("script", "outcome"),
    [(hang_in_the_stream, "timeout"), (break_off, "unreachable"), (break_off_whole, "unreachable")],
)
def test_stream_that_breaks_off_ends_the_connection(
    open_door: Door, llm: LlmServer, caplog: pytest.LogCaptureFixture, script: Any, outcome: str
) -> None:
    door = open_door(llm_timeout_s=0.3)
    llm.script = script
    received: list[bytes] = []
    with (
        httpx.Client(timeout=20) as client,
        client.stream("POST", url(door), json=chat("hi")) as response,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        received.extend(response.iter_raw())
    assert (response.status_code, received) == (200, [b"data: 1\n\n"])
    eventually(lambda: counted(door, outcome) == 1)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert script is not hang_in_the_stream or llm.last().has_left.wait(10)
    llm.script = answer()
    assert httpx.post(url(door), json=chat("hi")).status_code == 200


def test_stream_counts_as_accepted_and_is_finished_in_a_drain(open_door: Door, llm: LlmServer) -> None:
    door = open_door()
    llm.script = steps = Steps(b"1", b"2")
    with httpx.Client(timeout=20) as client, client.stream("POST", url(door), json=chat("hi")) as response:
        received = response.iter_raw()
        steps.go()
        assert next(received) == b"1"
        assert door.engine.num_accepted == 1
        door.stop()
        eventually(lambda: "DRAINING" in str(door.engine.state))
        time.sleep(0.2)
        steps.go()
        assert b"".join(received) == b"2"
    door.wait_for_the_end()


def test_grace_cuts_a_stream_off(open_door: Door, llm: LlmServer) -> None:
    door = open_door(request_timeout_s=0.5, shutdown_grace_s=0.5)
    llm.script = hang_in_the_stream
    with httpx.Client(timeout=20) as client, client.stream("POST", url(door), json=chat("hi")) as response:
        door.stop()
        with pytest.raises(httpx.RemoteProtocolError):
            list(response.iter_raw())
    door.wait_for_the_end()
    assert llm.last().has_left.wait(10)


def test_chat_may_take_longer_than_requests_for_embeddings(open_door: Door, llm: LlmServer) -> None:
    door = open_door(request_timeout_s=0.2)
    ok = answer()

    async def slow(asked: Asked) -> None:
        await asyncio.sleep(0.5)
        await ok(asked)

    llm.script = slow
    assert httpx.post(url(door), json=chat("hi")).status_code == 200


def test_chats_do_not_wait_for_each_other(door: Served, llm: LlmServer) -> None:
    ok = answer()

    async def all_at_once(asked: Asked) -> None:
        while len(llm.asked) < 100:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        await ok(asked)

    llm.script = all_at_once

    async def ask() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=20, limits=limits) as client:
            return await asyncio.gather(*(client.post(url(door), json=chat("hi")) for _ in range(100)))

    assert {response.status_code for response in asyncio.run(ask())} == {200}


def test_tokens_stay_leased_until_the_answer_begins(open_door: Door, llm: LlmServer) -> None:
    lease_s = 0.4
    door = open_door(handoff_lease_s=lease_s)
    llm.script = steps = Steps(b"1", b"2")
    with (
        httpx.Client(timeout=20) as client,
        client.stream("POST", url(door), json=chat(image_part(encode_image()))) as response,
    ):
        for _ in range(10):
            time.sleep(lease_s / 4)
            assert door.scrape().total("handoff_leased_bytes") > 0
        received = response.iter_raw()
        steps.go()
        assert next(received) == b"1"
        time.sleep(lease_s * 1.1)
        assert door.scrape().total("handoff_leased_bytes") == 0
        steps.go()
        assert list(received) == [b"2"]


def test_slow_reader_holds_the_llm_server_back(door: Served, llm: LlmServer) -> None:
    size = 64 * 2**20
    sent = []

    async def much(asked: Asked) -> None:
        asked.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size // 2**20):
            asked.write(bytes(2**20))
            await asked.drain()
            sent.append(2**20)

    llm.script = much
    with httpx.Client(timeout=20) as client, client.stream("POST", url(door), json=chat("hi")) as response:
        time.sleep(0.5)
        assert sum(sent) < size // 2
        assert sum(map(len, response.iter_raw())) == size

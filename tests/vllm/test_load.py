"""Many chats at once, some of which fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from tests.support.chats import CHAT
from tests.support.sidecar import tokens_part
from tests.support.vllm_chats import (
    Part,
    ask,
    body_of,
    check_equal,
    check_error,
    messages_of,
    photo,
    read_answer,
    url_part,
)
from tests.support.vllm_lab import Lab

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.parametrize("lab", ["qwen3_vl"], indirect=True),
]

NUM_CHATS, EVERY_NTH_FAILS = 200, 10
PHOTOS = [photo(4000 + number, 200 + 24 * number, 300) for number in range(15)]


def is_bad(number: int) -> bool:
    return number % EVERY_NTH_FAILS == 0


def part_of(number: int) -> Part:
    if is_bad(number):
        return tokens_part(f"vs1-{number:064x}", [1, 16, 16])
    return url_part(PHOTOS[number % len(PHOTOS)])


async def send_all(url: str) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        bodies = [body_of(messages_of(part_of(number))) for number in range(NUM_CHATS)]
        posts = [client.post(CHAT, json=body) for body in bodies]
        return list(await asyncio.gather(*posts))


def test_two_hundred_chats_at_once_of_which_twenty_fail(lab: Lab, report: Callable[[str], None]) -> None:
    own = [ask(lab.plain.url, url_part(image)) for image in PHOTOS]
    answers = asyncio.run(send_all(lab.near.url))
    worst = 0.0
    for number, answer in enumerate(answers):
        if is_bad(number):
            check_error(answer)
        else:
            worst = max(worst, check_equal(read_answer(answer), own[number % len(PHOTOS)]))
    assert lab.by_dir.is_healthy()
    assert lab.by_dir.metric("num_requests_running") == lab.by_dir.metric("num_requests_waiting") == 0
    report(f"{len(answers)} chats at once: 20 failed alone, the others are right within {worst:.1e}")

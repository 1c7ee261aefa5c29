"""What clients do besides one question about images, through the door."""

from __future__ import annotations

import json
from http.client import HTTPConnection
from urllib.parse import urlsplit

import httpx
import pytest
from openai import OpenAI

from tests.support.chats import CHAT
from tests.support.vllm_chats import (
    ask,
    body_of,
    check_equal,
    messages_of,
    photo,
    read_answer,
    send,
    url_part,
)
from tests.support.vllm_lab import Lab
from tests.support.vllm_server import MODEL
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.parametrize("lab", ["qwen3_vl"], indirect=True),
]


def client(lab: Lab) -> OpenAI:
    return OpenAI(base_url=f"{lab.near.url}/v1", api_key="none", max_retries=0)


def test_second_turn(lab: Lab) -> None:
    """It sees the image of the first turn, a new one, and the first answer."""
    messages = messages_of(url_part(photo(1000, 300, 400)))
    first = read_answer(send(lab.near.url, body_of(messages)))
    messages += [{"role": "assistant", "content": first.text}, *messages_of(url_part(photo(1001)))]
    second, own = (read_answer(send(url, body_of(messages))) for url in (lab.near.url, lab.plain.url))
    assert own.num_prompt_tokens > first.num_prompt_tokens
    check_equal(second, own)


def test_text_alone(lab: Lab) -> None:
    check_equal(ask(lab.near.url), ask(lab.plain.url))


def test_openais_client_gets_the_answer_of_vllm(lab: Lab) -> None:
    own = ask(lab.plain.url, url_part(photo(1010)))
    with client(lab) as openai:
        body = body_of(messages_of(url_part(photo(1010))))
        extra = {"ignore_eos": body.pop("ignore_eos")}
        answer = openai.chat.completions.create(**body, extra_body=extra)
    assert answer.choices[0].message.content == own.text
    assert answer.usage.prompt_tokens == own.num_prompt_tokens


def test_streamed_pieces_are_the_answer(lab: Lab) -> None:
    own = ask(lab.plain.url, url_part(photo(1020)))
    with client(lab) as openai:
        body = body_of(messages_of(url_part(photo(1020))), stream=True)
        extra = {"ignore_eos": body.pop("ignore_eos")}
        chunks = list(
            openai.chat.completions.create(**body, stream_options={"include_usage": True}, extra_body=extra)
        )
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == own.text
    assert len([piece for piece in pieces if piece]) > 1
    assert chunks[-1].usage.prompt_tokens == own.num_prompt_tokens


def test_models_are_those_of_vllm(lab: Lab) -> None:
    with client(lab) as openai:
        assert [model.id for model in openai.models.list()] == [MODEL]


def test_tokens_of_a_chat_with_images(lab: Lab) -> None:
    body = {"model": MODEL, "messages": messages_of(url_part(photo(1030)))}
    answer, own = (
        httpx.post(f"{url}/tokenize", json=body, timeout=60).raise_for_status().json()
        for url in (lab.near.url, lab.plain.url)
    )
    assert own["count"] > 10
    assert (answer["count"], answer["tokens"]) == (own["count"], own["tokens"])


def test_vllms_own_refusal_comes_through(lab: Lab) -> None:
    body = body_of(messages_of(url_part(photo(1040))), model="another")
    answer, own = send(lab.near.url, body), send(lab.plain.url, body)
    assert (answer.status_code, answer.json()) == (own.status_code, own.json())
    assert answer.status_code == 404


def test_responses_are_those_of_vllm(lab: Lab) -> None:
    texts = []
    for url in (lab.near.url, lab.plain.url):
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai:
            answer = openai.responses.create(model=MODEL, input="Hello", max_output_tokens=8, temperature=0)
        texts.append(answer.output_text)
    assert texts[0] == texts[1] != ""


def test_loaded_images_are_counted(lab: Lab) -> None:
    names = ("vision_sidecar_images_total", "vision_sidecar_bytes_total")
    before = [lab.by_dir.metric(name) for name in names]
    ask(lab.near.url, *[url_part(photo(1090 + number, 256, 256)) for number in range(3)])
    images, num_bytes = (lab.by_dir.metric(name) - old for name, old in zip(names, before, strict=True))
    assert (images, num_bytes) == (3, 3 * 64 * 192 * 4)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_client_that_leaves_ends_its_request(lab: Lab, is_streamed: bool) -> None:
    body = body_of(messages_of(url_part(photo(1050 + is_streamed))), stream=is_streamed) | {
        "max_tokens": 12000
    }
    num_abandoned = lab.near.metric("llm_requests_total", 'status="abandoned"')
    connection = HTTPConnection(urlsplit(lab.near.url).netloc, timeout=60)
    connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
    if is_streamed:
        assert connection.getresponse().read(6) == b"data: "
    eventually(lambda: lab.by_dir.metric("num_requests_running") == 1)
    connection.close()
    eventually(lambda: lab.by_dir.metric("num_requests_running") == 0, timeout_s=5)
    assert lab.near.metric("llm_requests_total", 'status="abandoned"') == num_abandoned + 1


def test_kept_prefix_is_used_only_for_the_same_images(lab: Lab) -> None:
    images = [photo(1060 + number) for number in range(8)]
    first = ask(lab.near.url, *map(url_part, images))
    again = ask(lab.near.url, *map(url_part, images))
    assert first.num_cached_tokens < again.num_cached_tokens
    assert again.num_cached_tokens > again.num_prompt_tokens / 2
    check_equal(again, first)
    changed = [photo(1070), *images[1:]]
    other = ask(lab.near.url, *map(url_part, changed))
    assert other.num_cached_tokens < first.num_prompt_tokens / 8
    assert other.logprobs != again.logprobs
    check_equal(other, ask(lab.plain.url, *map(url_part, changed)))


def test_kept_prefix_needs_no_tokens_in_the_store(lab: Lab) -> None:
    """vLLM then asks for none, so the request does not fail."""
    parts = lab.near.hand_over([photo(1080 + number, 320, 320) for number in range(4)])
    first = ask(lab.by_dir.url, *parts)
    for part in parts[:-1]:
        lab.near.delete(part["uuid"])
    check_equal(ask(lab.by_dir.url, *parts), first)

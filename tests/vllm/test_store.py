"""Tokens that are gone when vLLM asks for them, a store without room, and a service that stops meanwhile."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from openai import OpenAI

from tests.support.vllm_chats import (
    Part,
    ask,
    body_of,
    check_equal,
    check_error,
    messages_of,
    photo,
    send,
    url_part,
)
from tests.support.vllm_lab import API_KEY, FAR_BYTES, FAR_LEASE_S, Lab
from tests.support.vllm_server import VllmServer
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.parametrize("lab", ["qwen3_vl"], indirect=True),
]

IMAGE_BYTES = 256 * 192 * 4  # the tokens of a photograph of 512 × 512
NUM_THAT_FIT = FAR_BYTES // (IMAGE_BYTES + 1024)


@pytest.fixture(autouse=True)
def no_leases(lab: Lab) -> None:
    no_leases_left(lab)


def no_leases_left(lab: Lab) -> None:
    """Waits until nothing in the small store is leased."""
    eventually(lambda: lab.far.metric("handoff_leased_bytes") == 0)


def fill(lab: Lab, seed: int) -> None:
    """Fills the small store with leased tokens. Nothing else may be leased."""
    lab.far.hand_over([photo(seed + number, 512, 512) for number in range(NUM_THAT_FIT)])


def check_fails(vllm: VllmServer, part: Part) -> None:
    check_error(send(vllm.url, body_of(messages_of(part))))
    assert vllm.is_healthy()


def test_full_store_refuses_until_a_lease_ends(lab: Lab) -> None:
    newcomer = photo(3050, 512, 512)
    fill(lab, 3000)
    body = body_of(messages_of(url_part(newcomer)))
    for refusal in (lab.far.embed([newcomer], "format=handoff"), send(lab.far.url, body, lab.far.headers)):
        assert refusal.status_code == 429
        assert refusal.json()["error"]["code"] == "handoff_full"
        assert 1 <= int(refusal.headers["retry-after"]) <= FAR_LEASE_S
    time.sleep(int(refusal.headers["retry-after"]))
    own = ask(lab.plain.url, url_part(newcomer))
    check_equal(ask(lab.far.url, url_part(newcomer), headers=lab.far.headers), own)


def test_openais_client_waits_until_a_lease_ends(lab: Lab) -> None:
    newcomer = photo(3150, 512, 512)
    own = ask(lab.plain.url, url_part(newcomer))
    fill(lab, 3100)
    body = body_of(messages_of(url_part(newcomer)))
    extra = {"ignore_eos": body.pop("ignore_eos")}
    with OpenAI(base_url=f"{lab.far.url}/v1", api_key=API_KEY, max_retries=4) as client:
        answer = client.chat.completions.create(**body, extra_body=extra)
    assert answer.choices[0].message.content == own.text
    assert lab.far.metric("errors_total", 'code="handoff_full"') > 0


def test_tokens_that_were_evicted_before_vllm_asks(lab: Lab) -> None:
    image = photo(3250, 512, 512)
    [part] = lab.far.hand_over([image])
    assert lab.far.has(part["uuid"])
    no_leases_left(lab)
    fill(lab, 3200)
    assert not lab.far.has(part["uuid"])
    check_fails(lab.by_url, part)
    no_leases_left(lab)
    check_equal(ask(lab.by_url.url, *lab.far.hand_over([image])), ask(lab.plain.url, url_part(image)))


@pytest.mark.parametrize("name", ["by_dir", "by_url"])
def test_tokens_that_were_deleted_before_vllm_asks(lab: Lab, name: str) -> None:
    vllm, sidecar = (lab.by_dir, lab.near) if name == "by_dir" else (lab.by_url, lab.far)
    image = photo(3300, 300, 500)
    [part] = sidecar.hand_over([image])
    sidecar.delete(part["uuid"])
    check_fails(vllm, part)
    [again] = sidecar.hand_over([image])
    assert again == part
    check_equal(ask(vllm.url, again), ask(lab.plain.url, url_part(image)))


@pytest.mark.parametrize("leaves", [False, True])
def test_service_that_hangs_delays_no_other_chat(lab: Lab, leaves: bool) -> None:
    image = photo(3700 + leaves)
    [part] = lab.far.hand_over([image])
    text_alone = ask(lab.by_url.url)
    before = lab.by_url.metric("vision_sidecar_failures_total", reason="timeout")
    lab.far.send_signal(signal.SIGSTOP)
    try:
        body = body_of(messages_of(part))
        with ThreadPoolExecutor() as threads:
            hanging = threads.submit(send, lab.by_url.url, body, timeout_s=1 if leaves else 100)
            eventually(lambda: lab.by_url.metric("num_requests_waiting") == 1)
            check_equal(ask(lab.by_url.url), text_alone)
            assert not hanging.done() or leaves
            if leaves:
                assert isinstance(hanging.exception(), httpx.ReadTimeout)
            else:
                check_error(hanging.result())
                assert lab.by_url.metric("vision_sidecar_failures_total", reason="timeout") == before + 1
        eventually(lambda: lab.by_url.metric("num_requests_waiting") == 0)
    finally:
        lab.far.send_signal(signal.SIGCONT)
    check_equal(ask(lab.by_url.url, part), ask(lab.plain.url, url_part(image)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_restart_keeps_the_tokens_in_the_folder(lab: Lab, number: int) -> None:
    image = photo(3400 + number)
    [part] = lab.near.hand_over([image])
    own = ask(lab.plain.url, url_part(image))
    lab.near.stop(number)
    check_equal(ask(lab.by_dir.url, part), own)  # vLLM does not need the service
    lab.near.start()
    assert lab.near.has(part["uuid"])
    new = photo(3500 + number)
    check_equal(ask(lab.near.url, url_part(new)), ask(lab.plain.url, url_part(new)))


def test_service_that_is_away_while_vllm_asks(lab: Lab) -> None:
    image = photo(3600)
    [part] = lab.far.hand_over([image])
    before = lab.by_url.metric("vision_sidecar_failures_total", reason="unreachable")
    lab.far.stop()
    check_fails(lab.by_url, part)
    eventually(lambda: lab.by_url.metric("vision_sidecar_failures_total", reason="unreachable") == before + 1)
    lab.far.start()
    check_equal(ask(lab.by_url.url, part), ask(lab.plain.url, url_part(image)))

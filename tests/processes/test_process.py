"""A server of several processes as its callers and its operator meet it."""

from __future__ import annotations

import asyncio
import base64
import os
import random
import re
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load

from service.config.settings import Settings
from service.engine.replicas import load_replicas
from tests.support.app import Service, encode_image
from tests.support.process import Process, SlowUpload, wait_for_metric, wait_until_unready
from tests.support.supervising import request_each
from tests.support.traffic import Answer, Scrape, call, leave, post
from tests.support.waiting import eventually

NUM_SERVERS = 2
OF_EACH_ANSWER = ("date", "x-request-id", "server-timing", "connection")
LOOKED_AT = (
    *("/info", "/v1/models", "/openapi.json", "/nowhere", "/embed"),
    *("/healthz", "/readyz", "/health"),
)


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    """A server with the demo model, which the last test ends."""
    flags = ("--port", "0", "--device", "cpu", "--decode-threads", "2")
    running = Process(*flags, "--cache-bytes", "0", "--api-server-count", str(NUM_SERVERS)).ready()
    yield running
    running.kill()


def children_of(process: Process) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)  # type: ignore[no-any-return]


def has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)  # and nobody waits for it
    except psutil.NoSuchProcess:
        return True


def scrape(process: Process) -> Scrape:
    return Scrape(httpx.get(f"{process.url}/metrics").raise_for_status().text)


def requests() -> list[httpx.Request]:
    """One request of each kind."""
    png, jpeg = encode_image(100, 70), encode_image(333, 500, format="JPEG", seed=1)
    large = encode_image(1024, 1024, format="JPEG", seed=2)
    data = base64.b64encode(png).decode()
    parts = [("image", (f"{i}.png", image)) for i, image in enumerate((png, jpeg, encode_image(64, 64)))]

    def embed(content: bytes, query: str = "", kind: str = "application/octet-stream") -> httpx.Request:
        return httpx.Request("POST", f"/embed{query}", content=content, headers={"content-type": kind})

    return [
        embed(png),
        embed(jpeg, "?normalize=false&dtype=float16&encoding_format=base64"),
        embed(jpeg, "?pooling=none&format=npy"),
        embed(large, "?pooling=none&deepstack=true&format=safetensors"),
        embed(png, "?pooling=none&dtype=bfloat16&format=safetensors"),
        embed(jpeg, "?format=vllm"),
        httpx.Request("POST", "/embed?pooling=none&format=safetensors", files=parts),
        httpx.Request("POST", "/embed", json={"images": [data, f"data:image/png;base64,{data}"]}),
        httpx.Request("POST", "/v1/embeddings", json={"model": "demo", "input": data}),
        embed(png[:50]),
        embed(png, "?format=tiff"),
        embed(png, kind="text/plain"),
        *(httpx.Request("GET", path) for path in LOOKED_AT),
    ]


def test_answers_are_those_of_one_process_bit_for_bit(
    process: Process, serve: Callable[..., Service]
) -> None:
    alone = serve(Settings(device="cpu", decode_threads=2), start_replicas=load_replicas)

    def essence(response: httpx.Response) -> tuple[int, dict[str, str], bytes]:
        headers = {name: text for name, text in response.headers.items() if name not in OF_EACH_ANSWER}
        return response.status_code, headers, re.sub(rb'"created":\d+', b"", response.content)

    statuses = set()
    for request in requests():
        content, headers, path = request.read(), request.headers, request.url.raw_path.decode()
        kind = {"content-type": headers["content-type"]} if "content-type" in headers else {}
        expected = essence(alone.request(request.method, path, content=content, headers=kind))
        url = process.url + path
        answers = request_each(NUM_SERVERS, request.method, url, content=content, headers=kind)
        assert [essence(answer) for answer in answers] == [expected] * NUM_SERVERS, path
        assert len({answer.content for answer in answers}) == 1
        statuses.add(expected[0])
    assert statuses == {200, 400, 404, 405, 415}


def test_connections_that_stay_open_are_shared_equally(process: Process) -> None:
    port, num_clients = int(process.url.rsplit(":", 1)[1]), 32

    def num_connections(child: psutil.Process) -> int:
        return sum(
            each.status == "ESTABLISHED" and each.laddr.port == port for each in child.net_connections()
        )

    children = children_of(process)
    eventually(lambda: not any(num_connections(child) for child in children))
    with ExitStack() as clients:
        for _ in range(num_clients):
            clients.enter_context(socket.create_connection(("127.0.0.1", port)))
        eventually(lambda: sum(num_connections(child) for child in children) == num_clients)
        share = num_clients / NUM_SERVERS
        assert max(num_connections(child) for child in children) <= 1.3 * share


def test_every_api_server_returns_the_metrics_of_all_processes(process: Process) -> None:
    before = scrape(process)
    port, rng = int(process.url.rsplit(":", 1)[1]), random.Random(4)
    images = [encode_image(rng.randint(40, 200), rng.randint(40, 200), seed=n) for n in range(6)]
    numbers = [1, 2, 0, 4, 1] * 8  # images of each request; 0: what is none

    async def everyone() -> list[Answer]:
        sent = [post(*rng.choices(images, k=number)) if number else post(b"nothing") for number in numbers]
        left = [leave(port, sent[0], num_bytes=200, wait_s=0.05, reset=index % 2 == 0) for index in range(6)]
        answers, _ = await asyncio.gather(
            asyncio.gather(*(call(port, request) for request in sent)), asyncio.gather(*left)
        )
        return answers

    answers = asyncio.run(everyone())
    assert [answer.status for answer in answers] == [200 if number else 400 for number in numbers]
    eventually(lambda: scrape(process).total("requests_in_flight") == 1)
    texts = [
        each.text for _ in range(2) for each in request_each(NUM_SERVERS, "GET", f"{process.url}/metrics")
    ]
    found = [Scrape(text) for text in texts]
    for one in found:
        one.check_at_rest()
        counted = Counter(one.statuses())
        counted.subtract(before.statuses())
        assert +counted == {200: len(numbers) - numbers.count(0), 400: numbers.count(0), 499: 6}
        assert one.total("images_total") - before.total("images_total") == sum(numbers)
        assert one.total("requests_in_flight") == one.total("ready") == one.total("device_up") == 1
        assert len([name for name, _, _ in one.samples if name == "info"]) == 1
        assert one.total("queue_limit_tokens") == 131072
    with ThreadPoolExecutor(8) as threads:  # calls during a round are answered by the next round
        at_once = list(threads.map(lambda _: scrape(process).statuses(), range(16)))
    assert at_once == [found[0].statuses()] * 16
    for name in ("cpu_seconds_total", "start_time_seconds", "open_fds", "max_fds", "virtual_memory_bytes"):
        assert found[0].total(f"process_{name}") > 0
    processes = [psutil.Process(process.pid), *children_of(process)]
    resident = sum(one.memory_info().rss for one in processes)
    assert found[0].total("process_resident_memory_bytes") == pytest.approx(resident, rel=0.2)
    openmetrics = httpx.get(f"{process.url}/metrics", headers={"accept": "application/openmetrics-text"})
    assert openmetrics.text.endswith("# EOF\n")


def test_children_of_a_killed_supervisor_exit(process: Process) -> None:
    """The last test of this server."""
    children = children_of(process)
    assert len(children) == NUM_SERVERS + 1  # and the device
    os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: all(has_ended(child) for child in children), timeout_s=10)
    assert process.exit_code() == -signal.SIGKILL


def test_first_signal_to_the_process_group_drains_and_the_second_kills() -> None:
    process = Process(
        "--port", "0", "--device", "cpu", "--cache-bytes", "0", "--api-server-count", str(NUM_SERVERS)
    ).ready()
    try:
        children = children_of(process)
        uploads = [SlowUpload(process.url) for _ in range(NUM_SERVERS)]
        wait_for_metric(process.url, "requests_in_flight 3.0")  # and the one for metrics
        os.killpg(process.pid, signal.SIGINT)
        assert wait_until_unready(process.url).json()["error"]["code"] == "draining"
        uploads[0].finish()  # its process exits, and no new connection is lost
        for _ in range(100):
            assert httpx.get(f"{process.url}/healthz").status_code == 200
        assert uploads[0].status() == 200
        os.killpg(process.pid, signal.SIGINT)
        assert process.exit_code() == -signal.SIGINT
        assert uploads[1].status() == 0
        eventually(lambda: all(has_ended(child) for child in children), timeout_s=5)
        assert not [line for line in process.log if "Traceback" in line or "CRITICAL" in line]
    finally:
        process.kill()


def test_api_servers_share_one_encode_and_one_store(tmp_path: Path) -> None:
    flags = ["--port", "0", "--device", "cpu", "--api-server-count", str(NUM_SERVERS)]
    process = Process(*flags, "--handoff-dir", str(tmp_path / "tokens")).ready()
    try:
        url, image = f"{process.url}/embed?format=handoff", encode_image(200, 200)
        headers = {"content-type": "image/png"}
        with ThreadPoolExecutor(8) as clients:  # each with a connection of its own
            answers = list(clients.map(lambda _: httpx.post(url, content=image, headers=headers), range(16)))
        assert {answer.status_code for answer in answers} == {200}
        [uuid] = {answer.json()["data"][0]["uuid"] for answer in answers}
        found = scrape(process)
        assert found.total("images_total") == found.total("handoff_entries") == 1
        assert (found.total("cache_misses_total"), found.total("cache_hits_total")) == (1, 15)
        query = "pooling=none&deepstack=true&format=safetensors"
        expected = httpx.post(f"{process.url}/embed?{query}", content=image, headers=headers).content
        for answer in request_each(NUM_SERVERS, "GET", f"{process.url}/handoff/{uuid}"):
            assert torch.equal(load(answer.content)["tokens"], load(expected)["embeddings"])
        process.signal(signal.SIGTERM)
        assert process.exit_code() == 0
    finally:
        process.kill()

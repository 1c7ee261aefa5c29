"""Faults under load in a server process with the demo model: the answers, the log and the exit code."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import httpx
import numpy as np
import pytest
import torch

from models import VisionEncoder
from tests.support.traffic import Answer, NoAnswer, Scrape, call, leave, png, post
from tests.test_cli import Process, SlowUpload, wait_for_metric

Start = Callable[..., Process]

FAULT = re.compile(r" (WARNING|ERROR|CRITICAL) (?!service.app: model demo)")


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers and waits until they are ready."""
    running: list[Process] = []

    def start_process(*flags: str, environ: Mapping[str, str] = {}) -> Process:
        running.append(Process("--port", "0", "--device", "cpu", *flags, environ=environ))
        return running[-1].ready()

    yield start_process
    for process in running:
        process.kill()


@pytest.fixture(scope="module")
def known() -> list[tuple[bytes, list[float]]]:
    return known_images()


def known_images() -> list[tuple[bytes, list[float]]]:
    """Images of various sizes with their embeddings, each encoded alone."""
    encoder = VisionEncoder.from_pretrained("demo", device="cpu", dtype=torch.float32)
    rng = np.random.default_rng(3)
    found = []
    for _ in range(12):
        height, width = rng.integers(40, 400, 2)
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        [tokens] = encoder.encode([encoder.preprocess(pixels)])
        mean = tokens[:, : encoder.hidden_size].mean(dim=0)
        found.append((png(pixels), (mean / mean.norm()).tolist()))
    return found


class Signalled(Protocol):
    """A server that can be told to stop."""

    url: str

    def signal(self, number: int) -> None: ...


def port_of(process: Signalled) -> int:
    return int(process.url.rsplit(":", 1)[1])


def scrape(process: Process) -> Scrape:
    return Scrape(httpx.get(f"{process.url}/metrics").text)


def large_images(number: int) -> bytes:
    """A request that takes seconds to encode, and little to decode."""
    return post(*[png(np.zeros((1024, 1024, 3), dtype=np.uint8))] * number)


def check_embeddings(answer: Answer, expected: Sequence[Sequence[float]]) -> None:
    assert (answer.status, answer.code) == (200, None)
    np.testing.assert_allclose(answer.embeddings, expected, atol=1e-5)


class Load:
    """Callers who go on until the server takes no connection any more."""

    def __init__(
        self, process: Signalled, known: Sequence[tuple[bytes, list[float]]], delay_s: float
    ) -> None:
        self._process = process
        self._known = known
        self._delay_s = delay_s
        self._stopped_at: float | None = None
        self._rng = random.Random(6)
        self.answers: list[tuple[float, Answer]] = []  # with the time when it was asked for

    @property
    def refuses_from(self) -> float:
        """Before then nobody may be refused."""
        return float("inf") if self._stopped_at is None else self._stopped_at + self._delay_s

    async def stop_the_server(self) -> None:
        """In the midst of it all. With a delay, someone who comes late keeps the server for a while."""
        callers = [asyncio.create_task(self._keep_calling()) for _ in range(8)]
        while len(self.answers) < 20:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self._stopped_at = time.monotonic()
        self._process.signal(signal.SIGTERM)
        if self._delay_s:
            await asyncio.sleep(self._delay_s / 2)
            upload = SlowUpload(self._process.url)
            await asyncio.sleep(self._delay_s)
            upload.finish()
            assert await asyncio.to_thread(upload.status) == 200
        await asyncio.gather(*callers)

    async def _keep_calling(self) -> None:
        while True:
            image, vector = self._rng.choice(self._known)
            sent_at = time.monotonic()
            try:
                answer = await call(port_of(self._process), post(image))
            except (ConnectionError, NoAnswer):
                assert sent_at > self.refuses_from
                return  # a newcomer met the end itself
            if answer.status == 200:
                check_embeddings(answer, [vector])
            else:
                await asyncio.sleep(0.1)  # each is a line in a pipe that is read at the end only
            self.answers.append((sent_at, answer))


def test_callers_who_leave_and_a_signal_disturb_no_one(
    start: Start, known: list[tuple[bytes, list[float]]]
) -> None:
    process = start("--data-parallel-size", "2")
    port, rng = port_of(process), random.Random(5)

    async def act(index: int) -> None:
        await asyncio.sleep(index / 100)
        chosen = rng.choices(known, k=rng.choice([1, 2, 4]))
        request = post(*(image for image, _ in chosen))
        if index % 10 >= 3:
            check_embeddings(await call(port, request), [vector for _, vector in chosen])
            return
        num_bytes = rng.choice([len(request), rng.randrange(len(request))])
        await leave(port, request, num_bytes=num_bytes, wait_s=rng.uniform(0, 0.2), reset=index % 2 == 0)

    async def everyone() -> None:
        await asyncio.gather(*(act(index) for index in range(100)))

    asyncio.run(everyone())
    wait_for_metric(process.url, "requests_in_flight 1.0")  # the one for metrics
    found = scrape(process)
    assert sum(found.statuses().values()) == 100
    assert set(found.statuses()) == {200, 499}
    found.check_at_rest()

    load = Load(process, known, 0.0)
    asyncio.run(load.stop_the_server())
    assert process.exit_code() == 0
    assert {answer.code for _, answer in load.answers} <= {None, "draining"}
    assert [line for line in process.log if FAULT.search(line)] == []


def test_a_delayed_end_refuses_no_one_before_it_is_time(
    start: Start, known: list[tuple[bytes, list[float]]]
) -> None:
    process = start("--shutdown-delay-s", "1.5")
    load = Load(process, known, 1.5)
    asyncio.run(load.stop_the_server())
    assert process.exit_code() == 0
    refused = [(sent_at, answer) for sent_at, answer in load.answers if answer.status != 200]
    assert {(answer.status, answer.code) for _, answer in refused} == {(503, "draining")}
    answered_late = [answer for sent_at, answer in load.answers if sent_at > load.refuses_from - 1]
    assert all(answer.headers["connection"] == "close" for answer in answered_late)
    assert [line for line in process.log if FAULT.search(line)] == []


def test_a_device_that_finishes_nothing_holds_no_one_and_ends_the_process_with_1(start: Start) -> None:
    environ = {"OMP_NUM_THREADS": "1"}  # slow on every machine
    process = start("--request-timeout-s", "2", "--device-timeout-s", "3", environ=environ)
    port = port_of(process)

    async def everyone() -> list[Answer]:
        return await asyncio.gather(*(call(port, large_images(16)) for _ in range(4)))

    codes = Counter((answer.status, answer.code) for answer in asyncio.run(everyone()))
    assert codes == {(504, "deadline_exceeded"): 4}
    assert process.exit_code() == 1
    [lost, *rest] = [line for line in process.log if FAULT.search(line)]
    assert "CRITICAL service.engine: device cpu is lost: it has work and finished nothing for 3 s" in lost
    assert all("the process ends without it" in line for line in rest)

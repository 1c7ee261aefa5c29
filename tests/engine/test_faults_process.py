"""Faults under load in a server process with the demo model: the answers, the log and the exit code."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import httpx
import numpy as np
import pytest

from tests.support.load import FAULT, Load, check_embeddings, known_images, port_of
from tests.support.process import Process, wait_for_metric
from tests.support.traffic import Answer, Scrape, call, leave, png, post

Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers and waits until they are ready."""
    running: list[Process] = []

    def start_process(*flags: str, environ: Mapping[str, str] = {}) -> Process:
        running.append(
            Process("--port", "0", "--device", "cpu", "--cache-bytes", "0", *flags, environ=environ)
        )
        return running[-1].ready()

    yield start_process
    for process in running:
        process.kill()


@pytest.fixture(scope="module")
def known() -> list[tuple[bytes, list[float]]]:
    return known_images()


def scrape(process: Process) -> Scrape:
    return Scrape(httpx.get(f"{process.url}/metrics").text)


def large_images(number: int) -> bytes:
    """A request that takes seconds to encode, and much less to decode."""
    return post(*[png(np.zeros((1024, 1024, 3), dtype=np.uint8))] * number)


def test_callers_that_leave_and_a_signal_do_not_disturb_others(
    start: Start, known: list[tuple[bytes, list[float]]]
) -> None:
    # One thread for each replica: more would compete for the cores of a small machine.
    process = start("--data-parallel-size", "2", environ={"OMP_NUM_THREADS": "1"})
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

    async def act_all() -> None:
        await asyncio.gather(*(act(index) for index in range(60)))

    asyncio.run(act_all())
    wait_for_metric(process.url, "requests_in_flight 1.0")  # the request for the metrics
    found = scrape(process)
    assert sum(found.statuses().values()) == 60
    assert set(found.statuses()) == {200, 499}
    found.check_at_rest()

    load = Load(process, known, 0.0)
    asyncio.run(load.stop_the_server())
    assert process.exit_code() == 0
    assert {answer.code for _, answer in load.answers} <= {None, "draining"}
    assert [line for line in process.log if FAULT.search(line)] == []


def test_no_request_is_refused_before_the_shutdown_delay_is_over(
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


def test_stuck_device_does_not_delay_answers_and_the_process_exits_with_1(start: Start) -> None:
    environ = {"OMP_NUM_THREADS": "1"}  # so that a batch takes seconds on every machine
    process = start("--request-timeout-s", "1", "--device-timeout-s", "2", environ=environ)
    port = port_of(process)

    async def call_four() -> list[Answer]:
        return await asyncio.gather(*(call(port, large_images(16)) for _ in range(4)))

    codes = Counter((answer.status, answer.code) for answer in asyncio.run(call_four()))
    assert codes == {(504, "deadline_exceeded"): 4}
    assert process.exit_code() == 1
    [lost, *rest] = [line for line in process.log if FAULT.search(line)]
    assert (
        "CRITICAL service.engine.engine: device cpu is lost: it has work and finished nothing for 2 s" in lost
    )
    assert all("the process ends without it" in line for line in rest)

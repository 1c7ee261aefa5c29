"""A supervisor in this process, with a device that the test holds up or breaks; API servers are processes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
import torch
import uvloop

from models import EncodeItem, ModelError, ReplicaGroup
from service.__main__ import address, listen
from service.api_servers.supervisor import Supervisor, count_servers
from service.replicas import load_replicas
from service.settings import Settings
from tests.api_servers import CopyingEncoder
from tests.conftest import fake_replicas, only
from tests.serving import HeldUpload, embeddings_of, eventually, request_of
from tests.test_faults_process import FAULT, Load, known_images
from tests.traffic import Answer, NoAnswer, Scrape, call

# The lines to API servers that are gone are left to the end of the process, as there is none after it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


class Company:
    """A supervisor with its API servers. It runs in the main thread, which signals go to."""

    def __init__(self, settings: Settings, group: ReplicaGroup, num_servers: int) -> None:
        listener = listen("127.0.0.1", 0)
        self.url = address(listener)
        self.port: int = listener.getsockname()[1]
        self._group = group
        self._supervisor = Supervisor(settings, listener, num_servers, lambda settings: group)
        self._threads = ThreadPoolExecutor(16)

    @property
    def processes(self) -> list[int]:
        return [member.process.pid for member in self._supervisor._members]

    def run(self, scenario: Callable[[], None]) -> int:
        """Runs to the end, and the scenario meanwhile in another thread. Returns the exit code."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(self._run(scenario))

    async def _run(self, scenario: Callable[[], None]) -> int:
        serving = asyncio.create_task(self._supervisor.run())
        try:
            await asyncio.to_thread(scenario)
        except BaseException:
            for process in self.processes:
                os.kill(process, signal.SIGKILL)
            raise
        finally:
            code = await serving
        return code

    def signal(self, number: int) -> None:
        os.kill(os.getpid(), number)

    def wait_until_ready(self) -> None:
        eventually(lambda: httpx.get(f"{self.url}/readyz", timeout=60).status_code == 200, timeout_s=60)

    @property
    def exit_codes(self) -> list[int | None]:
        return [member.process.returncode for member in self._supervisor._members]

    def call_later(self, *levels: int) -> Future[Answer]:
        return self._threads.submit(lambda: asyncio.run(call(self.port, request_of(*levels))))

    def scrape(self) -> Scrape:
        return Scrape(httpx.get(f"{self.url}/metrics").raise_for_status().text)

    def close(self) -> None:
        self._group.close()
        self._threads.shutdown()
        gc.unfreeze()
        for thing in gc.get_objects():  # here the process goes on
            if type(thing) is socket.socket and thing.type == socket.SOCK_SEQPACKET:
                thing.close()


Start = Callable[..., Company]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[Company] = []

    def start_company(group: ReplicaGroup, num_servers: int = 2, **changes: object) -> Company:
        settings = only(Settings(decode_threads=2, shutdown_grace_s=35), **changes)
        running.append(Company(settings, group, num_servers))
        return running[-1]

    yield start_company
    for company in running:
        company.close()


def test_under_load_a_signal_disturbs_no_one_whose_request_was_taken(
    start: Start, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    company = start(load_replicas(Settings(device="cpu", data_parallel_size=2)))
    load = Load(company, known_images(), 0.0)

    def scenario() -> None:
        company.wait_until_ready()
        asyncio.run(load.stop_the_server())

    assert company.run(scenario) == 0
    assert company.exit_codes == [0, 0]
    assert len(load.answers) >= 20
    assert {answer.code for _, answer in load.answers} <= {None, "draining"}
    log = capfd.readouterr().err.splitlines()
    assert [line for line in log if FAULT.search(line)] == []
    assert len([line for line in log if "service.server: stopping" in line]) == 1
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_an_api_server_that_is_killed_ends_the_server_once_the_others_have_answered(
    start: Start, gate: threading.Event, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def hold(items: Sequence[EncodeItem]) -> None:
        gate.wait(60)

    company = start(fake_replicas(CopyingEncoder(hold)))
    outcomes: list[Answer | BaseException] = []

    def scenario() -> None:
        eventually(lambda: len(company.processes) == 2)
        for process in company.processes:  # while they start: what they are told is the supervisor's concern
            os.kill(process, signal.SIGINT)
            os.kill(process, signal.SIGTERM)
        company.wait_until_ready()
        calls = [company.call_later(level) for level in range(4)]
        eventually(lambda: company.scrape().total("requests_in_flight") == 5)  # and the scrape
        os.kill(company.processes[1], signal.SIGKILL)
        eventually(lambda: httpx.get(f"{company.url}/readyz").status_code == 503)
        assert company.scrape().total("requests_in_flight") == 3  # of the one that is left
        company.signal(signal.SIGTERM)  # an orchestrator that has seen it: the first signal, not the second
        assert company.scrape().total("requests_in_flight") == 3
        gate.set()
        outcomes.extend(future.exception(30) or future.result() for future in calls)

    assert company.run(scenario) == 1
    answered = {index: one for index, one in enumerate(outcomes) if isinstance(one, Answer)}
    assert len(answered) == 2
    for level, answer in answered.items():
        assert (answer.status, answer.embeddings) == (200, embeddings_of(level))
    assert all(isinstance(one, Answer | NoAnswer | ConnectionError) for one in outcomes)
    [said] = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert said.getMessage() == "API server 1 ended with -9; the server must be restarted"
    assert "Traceback" not in capfd.readouterr().err


def test_what_an_api_server_counted_stays_counted_while_others_drain(start: Start) -> None:
    company = start(fake_replicas(CopyingEncoder()))

    def scenario() -> None:
        company.wait_until_ready()
        uploads = [HeldUpload(company.port) for _ in range(2)]  # one for each
        eventually(lambda: company.scrape().total("requests_in_flight") == 3)
        assert [company.call_later(level).result(30).status for level in range(6)] == [200] * 6
        company.signal(signal.SIGTERM)
        uploads[0].leave()
        eventually(lambda: None in company.exit_codes and 0 in company.exit_codes)
        found = company.scrape()
        assert found.total("images_total") == 6
        assert found.statuses() == {200: 6, 499: 1}
        assert found.total("requests_in_flight") == 2
        uploads[1].leave()

    assert company.run(scenario) == 0


def test_an_api_server_that_does_not_answer_any_more_is_the_end(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    company = start(fake_replicas(CopyingEncoder()), device_timeout_s=1.0)

    def scenario() -> None:
        company.wait_until_ready()
        os.kill(company.processes[0], signal.SIGSTOP)

    assert company.run(scenario) == 1
    assert company.exit_codes[0] == -signal.SIGKILL
    said = [record.getMessage() for record in caplog.records if record.levelname == "CRITICAL"]
    assert said == [
        "API server 0 has not answered for 1 s",
        "API server 0 ended with -9; the server must be restarted",
    ]


def test_a_device_that_fails_under_load_is_told_to_all_api_servers_and_ends_the_server(
    start: Start, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail_on_one(items: Sequence[EncodeItem]) -> None:
        if any(int(image.patches.pixels[0, 0]) == bad for image in items):
            raise torch.AcceleratorError("illegal memory access")

    bad = 30  # the image of one API server; the other one has to be told
    company = start(fake_replicas(CopyingEncoder(fail_on_one)), max_batch_tokens=16)
    answers: list[Answer] = []

    def scenario() -> None:
        company.wait_until_ready()
        uploads = [HeldUpload(company.port) for _ in range(2)]  # one for each, which keep them from ending
        eventually(lambda: company.scrape().total("requests_in_flight") == 3)
        calls = [company.call_later(level) for level in range(60)]
        answers.extend(future.result(30) for future in calls)
        for _ in range(4):  # of both
            assert httpx.get(f"{company.url}/healthz").status_code == 503
        found = company.scrape()
        assert (found.total("device_up"), found.total("ready")) == (0, 0)
        assert sum(found.statuses().values()) == len(calls)
        for upload in uploads:
            upload.leave()

    assert company.run(scenario) == 1
    for level, answer in enumerate(answers):
        assert (answer.status, answer.code) in ((200, None), (503, "device_failed"))
        assert answer.status == 503 or answer.embeddings == embeddings_of(level)
    assert {answer.status for answer in answers} == {200, 503}
    log = capfd.readouterr().err
    [said] = [line for line in log.splitlines() if "CRITICAL" in line]
    assert "service.engine: device fake is lost: illegal memory access" in said
    assert not [record for record in caplog.records if record.levelname == "CRITICAL"]


def test_a_model_that_cannot_be_loaded_is_one_line(
    start: Start, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def load() -> None:
        raise ModelError("there are no weights")

    company = start(fake_replicas(CopyingEncoder(), load=load), 1, log_level="error")
    assert company.run(lambda: None) == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line.endswith("ERROR service.engine: cannot load model demo: there are no weights")
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


def test_replicas_that_cannot_be_had_are_one_line(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(settings: Settings) -> ReplicaGroup:
        raise ModelError("there is no such device")

    with listen("127.0.0.1", 0) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(Supervisor(settings, listener, 2, fail).run()) == 1
    [record] = caplog.records
    assert record.getMessage() == "cannot load model demo: there is no such device"


@pytest.mark.parametrize(
    ("changes", "num_servers"),
    [
        ({"api_server_count": 1}, 1),
        ({"api_server_count": 3}, 3),
        ({"decode_threads": 64}, 1),
        ({"decode_threads": 64, "data_parallel_size": 2}, 1),
        ({"device": "cuda:99", "decode_threads": 64}, 1),
    ],
)
def test_on_a_cpu_there_is_one_process_unless_more_are_asked_for(
    settings: Settings, changes: dict[str, object], num_servers: int
) -> None:
    assert count_servers(only(settings, **{"device": "cpu", **changes})) == num_servers

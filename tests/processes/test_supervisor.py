"""A supervisor in this process, with a device that the test holds up or breaks; API servers are processes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import httpx
import pytest
import torch
import uvloop

from models import EncodeItem, ModelError, ReplicaGroup
from service.__main__ import listen
from service.config.settings import Settings
from service.processes.supervisor.members import Process, spawn
from service.processes.supervisor.server_count import count_servers
from service.processes.supervisor.supervisor import Supervisor
from service.processes.wire.link import Link
from tests.support.app import FakeEncoder, fake_replicas, only
from tests.support.load import FAULT, Load, known_images
from tests.support.processes import CopyingEncoder, ThreadAsProcess
from tests.support.serving import HeldUpload, embeddings_of
from tests.support.supervising import Supervised, request_each
from tests.support.traffic import Answer, NoAnswer
from tests.support.waiting import eventually

# The lines to API servers that are gone are left to the end of the process, as there is none after it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


Start = Callable[..., Supervised]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[Supervised] = []
    groups: list[ReplicaGroup] = []
    devices: list[ThreadAsProcess] = []

    def start_company(
        *encoders: FakeEncoder,
        num_servers: int = 2,
        load: Callable[[], object] = lambda: None,
        is_deaf: bool = False,
        **changes: object,
    ) -> Supervised:
        """Without encoders the devices are processes, too, with the demo model."""
        changes = {"data_parallel_size": len(encoders) or 1, **changes}
        settings = only(Settings(device="cpu", decode_threads=2, shutdown_grace_s=35), **changes)
        if encoders:
            group = fake_replicas(*encoders, load=load, name="cpu")
            groups.append(group)

            def spawn_device(module: str, line: Link) -> Process:
                devices.append(ThreadAsProcess(line, group, is_deaf))
                return devices[-1]

        running.append(Supervised(settings, num_servers, spawn_device if encoders else spawn))
        return running[-1]

    yield start_company
    for device in devices:
        device.end()
    for group in groups:
        group.close()
    for device in devices:
        device.close()
    for company in running:
        company.close()


def test_under_load_no_request_is_reset_or_lost_after_a_signal(
    start: Start, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    company = start(data_parallel_size=2)  # processes, too
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


def test_killed_api_server_ends_the_server_once_the_others_have_answered(
    start: Start, gate: threading.Event, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def hold(items: Sequence[EncodeItem]) -> None:
        gate.wait(60)

    company = start(CopyingEncoder(hold))
    outcomes: list[Answer | BaseException] = []

    def scenario() -> None:
        eventually(lambda: len(company.processes) == 2)
        for process in company.processes:  # while they start: what they are told is the supervisor's concern
            os.kill(process, signal.SIGINT)
            os.kill(process, signal.SIGTERM)
        company.wait_until_ready()
        calls = []
        for level in range(4):  # two for each API server
            company.settle()
            calls.append(company.call_later(level))
            eventually(
                lambda: company.scrape().total("requests_in_flight") == len(calls) + 1
            )  # and the scrape
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


def test_counts_of_an_api_server_that_has_exited_stay_while_others_drain(start: Start) -> None:
    company = start(CopyingEncoder())

    def scenario() -> None:
        company.wait_until_ready()
        uploads = company.hold_each()
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


def test_stuck_api_server_ends_the_server(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    company = start(CopyingEncoder(), device_timeout_s=1.0)

    def scenario() -> None:
        company.wait_until_ready()
        os.kill(company.processes[0], signal.SIGSTOP)

    assert company.run(scenario) == 1
    assert company.exit_codes[0] == -signal.SIGKILL
    said = [record.getMessage() for record in caplog.records if record.levelname == "CRITICAL"]
    assert said == ["API server 0 has not answered for 1 s; the server must be restarted"]


def test_device_that_fails_under_load_is_reported_to_all_api_servers_and_ends_the_server(
    start: Start, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail_on_one(items: Sequence[EncodeItem]) -> None:
        if any(int(image.patches.pixels[0, 0]) == bad for image in items):
            raise torch.AcceleratorError("illegal memory access")

    bad = 30  # the image of one API server; the other one has to be told
    company = start(CopyingEncoder(fail_on_one), max_batch_tokens=16)
    answers: list[Answer] = []

    def scenario() -> None:
        company.wait_until_ready()
        uploads = company.hold_each()
        calls = [company.call_later(level) for level in range(60)]
        answers.extend(future.result(30) for future in calls)
        health = request_each(2, "GET", f"{company.url}/healthz")
        assert [answer.status_code for answer in health] == [503, 503]
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
    [record] = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert record.getMessage() == "device cpu is lost: illegal memory access"
    assert "CRITICAL" not in capfd.readouterr().err


def test_exit_of_a_device_process_fails_only_its_requests(
    start: Start,
    gate: threading.Event,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    taken: list[list[int]] = [[], []]

    def hold(index: int) -> Callable[[Sequence[EncodeItem]], None]:
        def take(items: Sequence[EncodeItem]) -> None:
            taken[index] += [int(item.patches.pixels[0, 0]) for item in items]
            gate.wait(60)

        return take

    company = start(*(CopyingEncoder(hold(index)) for index in range(2)), num_servers=1, max_batch_tokens=1)
    answers: list[Answer] = []

    def scenario() -> None:
        company.wait_until_ready()
        upload = HeldUpload(company.port)  # which keeps the server from ending
        calls = [company.call_later(level) for level in range(8)]
        eventually(lambda: all(taken) and company.scrape().total("requests_in_flight") == 10)
        company.device("cpu:1").kill()
        eventually(lambda: httpx.get(f"{company.url}/healthz").status_code == 503)
        assert company.scrape().total("device_up") == 1
        gate.set()
        answers.extend(future.result(30) for future in calls)
        assert company.scrape().total("queue_images") == 0
        upload.leave()

    assert company.run(scenario) == 1
    lost = [level for level, answer in enumerate(answers) if answer.status == 503]
    assert lost
    assert set(taken[1]) <= {*lost} <= {*taken[1]} | {*range(8)} - {*taken[0]}
    for level in {*range(8)} - {*lost}:
        assert (answers[level].status, answers[level].embeddings) == (200, embeddings_of(level))
    assert {answers[level].code for level in lost} == {"device_failed"}
    [record] = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert record.getMessage() == "device cpu:1 is lost: its process ended with -9"
    log = capfd.readouterr().err
    assert "CRITICAL" not in log
    assert "Traceback" not in log


def test_exit_of_a_device_process_while_loading_logs_one_line(
    start: Start, gate: threading.Event, capfd: pytest.CaptureFixture[str]
) -> None:
    company = start(CopyingEncoder(), num_servers=1, load=lambda: gate.wait(60), log_level="error")

    def scenario() -> None:
        eventually(lambda: httpx.get(f"{company.url}/healthz", timeout=30).status_code == 200)
        company.device("cpu").kill()

    assert company.run(scenario) == 1
    gate.set()
    [line] = capfd.readouterr().err.splitlines()
    message = "cannot load model demo: device cpu cannot load it: its process ended with -9"
    assert line.endswith(f"ERROR service.engine.engine: {message}")


def test_model_that_one_device_cannot_load_is_reported_while_another_loads(
    start: Start, gate: threading.Event, capfd: pytest.CaptureFixture[str]
) -> None:
    def load() -> None:
        if "cpu:0" in threading.current_thread().name:
            raise ModelError("there are no weights")
        gate.wait(60)

    company = start(*(CopyingEncoder() for _ in range(2)), num_servers=1, load=load, log_level="error")
    assert company.run(lambda: None) == 1
    gate.set()
    [line] = capfd.readouterr().err.splitlines()
    assert line.endswith("ERROR service.engine.engine: cannot load model demo: there are no weights")


def test_device_process_that_does_not_exit_is_killed(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    company = start(CopyingEncoder(), num_servers=1, is_deaf=True)

    def scenario() -> None:
        company.wait_until_ready()
        company.signal(signal.SIGTERM)

    assert company.run(scenario) == 0
    [record] = [record for record in caplog.records if record.levelno > logging.INFO]
    assert record.getMessage() == "the process of cpu does not end, and is killed"


def test_stuck_device_process_loses_its_device(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    company = start(num_servers=1, device_timeout_s=1.0)

    def scenario() -> None:
        company.wait_until_ready()
        assert company.are_idle == [1]
        os.kill(company.device_processes[0], signal.SIGSTOP)

    assert company.run(scenario) == 1
    assert company.are_idle == [0]
    [record] = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert record.getMessage() == "device cpu is lost: its process has not answered for 1 s"
    assert company.exit_codes == [1]


def test_device_process_that_cannot_be_killed_blocks_nothing(
    start: Start, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    def hold(items: Sequence[EncodeItem]) -> None:
        gate.wait(60)

    company = start(CopyingEncoder(hold), num_servers=1, device_timeout_s=1.0)
    answers: list[Answer] = []

    def scenario() -> None:
        company.wait_until_ready()
        call = company.call_later(7)
        eventually(lambda: company.scrape().total("requests_in_flight") == 2)
        cast(ThreadAsProcess, company.device("cpu")).hang()
        answers.append(call.result(30))

    assert company.run(scenario) == 1
    gate.set()
    assert [answer.code for answer in answers] == ["device_failed"]
    said = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    assert said == [
        "device cpu is lost: its process has not answered for 1 s",
        "the process of cpu does not end, and is killed",
    ]


def test_model_that_cannot_be_loaded_logs_one_line(
    start: Start, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ModelError("there are no weights")

    company = start(CopyingEncoder(), num_servers=1, load=fail, log_level="error")
    assert company.run(lambda: None) == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line.endswith("ERROR service.engine.engine: cannot load model demo: there are no weights")
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


def test_missing_devices_log_one_line(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    with listen("127.0.0.1", 0) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(Supervisor(only(settings, device="cuda:99"), listener, 2).run()) == 1
    [record] = caplog.records
    assert record.getMessage().startswith("cannot load model demo: device 'cuda:99' is not here")


@pytest.mark.parametrize(
    ("changes", "num_servers"),
    [
        ({"api_server_count": 1}, 0),
        ({"api_server_count": 3}, 3),
        ({"decode_threads": 64}, 0),
        ({"decode_threads": 64, "data_parallel_size": 2}, 0),
        ({"device": "cuda:99", "decode_threads": 64}, 0),
    ],
)
def test_on_a_cpu_one_process_serves_unless_the_settings_ask_for_more(
    settings: Settings, changes: dict[str, object], num_servers: int
) -> None:
    assert count_servers(only(settings, **{"device": "cpu", **changes})) == num_servers


@pytest.mark.parametrize(
    ("num_gpus", "changes", "num_servers"),
    [
        (1, {"decode_threads": 16}, 4),
        (1, {"decode_threads": 64}, 4),
        (2, {"decode_threads": 64}, 8),
        (2, {"decode_threads": 20}, 5),
        (1, {"decode_threads": 7}, 0),
        (2, {"decode_threads": 7}, 1),
        (1, {"decode_threads": 64, "api_server_count": 1}, 0),
        (2, {"decode_threads": 64, "api_server_count": 1}, 1),
        (2, {"decode_threads": 64, "api_server_count": 3}, 3),
    ],
)
def test_api_servers_follow_gpus_and_threads_and_gpus_never_share_a_process(
    settings: Settings, num_gpus: int, changes: dict[str, object], num_servers: int
) -> None:
    devices = {f"cuda:{index}": torch.device("cuda", index) for index in range(num_gpus)}
    assert count_servers(only(settings, **changes), lambda device, number: devices) == num_servers

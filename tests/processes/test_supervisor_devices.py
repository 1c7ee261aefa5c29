"""The supervisor and the processes of devices that fail, hang or exit."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import cast

import httpx
import pytest
import torch

from models import EncodeItem, ModelError
from tests.support.processes import CopyingEncoder, ThreadAsProcess
from tests.support.serving import HeldUpload, embeddings_of
from tests.support.supervising import StartSupervisor, request_each
from tests.support.traffic import Answer
from tests.support.waiting import eventually

# The lines to API servers that are gone are left to the end of the process, as there is none after it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


def test_device_that_fails_under_load_is_reported_to_all_api_servers_and_ends_the_server(
    start_supervisor: StartSupervisor, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail_on_one(items: Sequence[EncodeItem]) -> None:
        if any(int(image.patches.pixels[0, 0]) == bad for image in items):
            raise torch.AcceleratorError("illegal memory access")

    bad = 30  # the image of one API server; the other one has to be told
    company = start_supervisor(CopyingEncoder(fail_on_one), max_batch_tokens=16)
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
    start_supervisor: StartSupervisor,
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

    company = start_supervisor(
        *(CopyingEncoder(hold(index)) for index in range(2)), num_servers=1, max_batch_tokens=1
    )
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
    start_supervisor: StartSupervisor, gate: threading.Event, capfd: pytest.CaptureFixture[str]
) -> None:
    company = start_supervisor(CopyingEncoder(), num_servers=1, load=lambda: gate.wait(60), log_level="error")

    def scenario() -> None:
        eventually(lambda: httpx.get(f"{company.url}/healthz", timeout=30).status_code == 200)
        company.device("cpu").kill()

    assert company.run(scenario) == 1
    gate.set()
    [line] = capfd.readouterr().err.splitlines()
    message = "cannot load model demo: device cpu cannot load it: its process ended with -9"
    assert line.endswith(f"ERROR service.engine.engine: {message}")


def test_model_that_one_device_cannot_load_is_reported_while_another_loads(
    start_supervisor: StartSupervisor, gate: threading.Event, capfd: pytest.CaptureFixture[str]
) -> None:
    def load() -> None:
        if "cpu:0" in threading.current_thread().name:
            raise ModelError("there are no weights")
        gate.wait(60)

    company = start_supervisor(
        *(CopyingEncoder() for _ in range(2)), num_servers=1, load=load, log_level="error"
    )
    assert company.run(lambda: None) == 1
    gate.set()
    [line] = capfd.readouterr().err.splitlines()
    assert line.endswith("ERROR service.engine.engine: cannot load model demo: there are no weights")


def test_device_process_that_does_not_exit_is_killed(
    start_supervisor: StartSupervisor, caplog: pytest.LogCaptureFixture
) -> None:
    company = start_supervisor(CopyingEncoder(), num_servers=1, is_deaf=True)

    def scenario() -> None:
        company.wait_until_ready()
        company.signal(signal.SIGTERM)

    assert company.run(scenario) == 0
    [record] = [record for record in caplog.records if record.levelno > logging.INFO]
    assert record.getMessage() == "the process of cpu does not end, and is killed"


def test_stuck_device_process_loses_its_device(
    start_supervisor: StartSupervisor, caplog: pytest.LogCaptureFixture
) -> None:
    company = start_supervisor(num_servers=1, device_timeout_s=1.0)

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
    start_supervisor: StartSupervisor, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    def hold(items: Sequence[EncodeItem]) -> None:
        gate.wait(60)

    company = start_supervisor(CopyingEncoder(hold), num_servers=1, device_timeout_s=1.0)
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

"""The supervisor and its API servers; how a server of several processes starts."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Sequence

import httpx
import pytest
import torch
import uvloop

from models import EncodeItem, ModelError
from service.__main__ import listen
from service.config.settings import Settings
from service.processes.supervisor.server_count import count_servers
from service.processes.supervisor.supervisor import Supervisor
from tests.support.app import only
from tests.support.load import FAULT, Load, known_images
from tests.support.processes import CopyingEncoder
from tests.support.serving import embeddings_of
from tests.support.supervising import StartSupervisor
from tests.support.traffic import Answer, NoAnswer
from tests.support.waiting import eventually

# The lines to API servers that are gone are left to the end of the process, as there is none after it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


def test_under_load_no_request_is_reset_or_lost_after_a_signal(
    start_supervisor: StartSupervisor, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    company = start_supervisor(data_parallel_size=2)  # processes, too
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
    start_supervisor: StartSupervisor,
    gate: threading.Event,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def hold(items: Sequence[EncodeItem]) -> None:
        gate.wait(60)

    company = start_supervisor(CopyingEncoder(hold), is_anew=True)
    outcomes: list[Answer | BaseException] = []

    def scenario() -> None:
        eventually(lambda: len(company.processes) == 2)
        for (
            process
        ) in company.processes:  # while they start_supervisor: what they are told is the supervisor's concern
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


def test_counts_of_an_api_server_that_has_exited_stay_while_others_drain(
    start_supervisor: StartSupervisor,
) -> None:
    company = start_supervisor(CopyingEncoder())

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


def test_stuck_api_server_ends_the_server(
    start_supervisor: StartSupervisor, caplog: pytest.LogCaptureFixture
) -> None:
    company = start_supervisor(CopyingEncoder(), device_timeout_s=1.0)

    def scenario() -> None:
        company.wait_until_ready()
        os.kill(company.processes[0], signal.SIGSTOP)

    assert company.run(scenario) == 1
    assert company.exit_codes[0] == -signal.SIGKILL
    said = [record.getMessage() for record in caplog.records if record.levelname == "CRITICAL"]
    assert said == ["API server 0 has not answered for 1 s; the server must be restarted"]


def test_model_that_cannot_be_loaded_logs_one_line(
    start_supervisor: StartSupervisor, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ModelError("there are no weights")

    company = start_supervisor(CopyingEncoder(), num_servers=1, load=fail, log_level="error")
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

"""The command line and the process: start, log, signals and exit codes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from service.__main__ import address, listen, main
from tests.support import forkserver
from tests.support.app import encode_image
from tests.support.process import Process, SlowReader, SlowUpload, wait_for_metric, wait_until_unready
from tests.support.project import ROOT

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING|ERROR|CRITICAL) [a-z_.]+: .+")


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Restores the signal handlers, which `main` replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    running: list[Process] = []

    def start_process(*flags: str, environ: Mapping[str, str] = {}, is_anew: bool = False) -> Process:
        running.append(Process("--port", "0", "--device", "cpu", *flags, environ=environ, is_anew=is_anew))
        return running[-1]

    yield start_process
    for process in running:
        process.kill()


def test_server_stops_with_0_after_requests_in_flight(start: Callable[..., Process]) -> None:
    process = start("--data-parallel-size", "2", is_anew=True).ready()
    assert "on cpu:0, cpu:1" in process.log[-1]
    answer = httpx.post(f"{process.url}/embed", content=encode_image(), headers={"content-type": "image/png"})
    assert answer.status_code == 200
    assert "server" not in answer.headers
    assert "connection" not in answer.headers
    SlowUpload(process.url).leave()
    wait_for_metric(process.url, 'requests_total{route="/embed",status="499"} 1.0')
    upload = SlowUpload(process.url)
    wait_for_metric(process.url, "requests_in_flight 2.0")  # the upload and the request for the metrics
    process.signal(signal.SIGTERM)
    assert wait_until_unready(process.url).json()["error"]["code"] == "draining"
    newcomer = httpx.post(
        f"{process.url}/embed", content=encode_image(), headers={"content-type": "image/png"}
    )
    assert newcomer.status_code == 503
    assert newcomer.headers["connection"] == "close"
    httpx.get(f"{process.url}/healthz").raise_for_status()
    upload.finish()
    assert upload.status() == 200
    assert process.exit_code() == 0
    assert all(LINE.fullmatch(line) for line in process.log), process.log
    assert any("random" in line for line in process.log)
    assert process.log[-1].endswith(": stopped")
    assert not any(": 200" in line for line in process.log)


@pytest.mark.parametrize("api_servers", ["1", "2"])
def test_server_whose_log_is_not_read_serves_and_stops_with_0(api_servers: str) -> None:
    (_, out), (log, their_log) = (multiprocessing.Pipe(duplex=False) for _ in range(2))
    flags = ["--port", "0", "--device", "cpu", "--api-server-count", api_servers]
    process = forkserver.serve(flags, {}, out, their_log)
    try:
        url = wait_for_address(log.fileno())
        with httpx.Client(base_url=url, headers={"X-Request-Id": "x" * 128}, timeout=60) as client:
            for _ in range(400):  # each adds a line of about 230 bytes; a pipe holds 65,536
                assert client.get("/nowhere").status_code == 404
            assert client.get("/healthz").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()


def wait_for_address(log: int) -> str:
    """Reads the log as far as the line with the address that the server listens on."""
    text = b""
    while not (match := re.search(rb"listening on (\S+)\n", text)):
        text += os.read(log, 4096)
    return match[1].decode()


def test_invalid_http_is_counted(start: Callable[..., Process]) -> None:
    process = start().listening()
    host, port = process.url.removeprefix("http://").rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(b"no HTTP\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 400"
    wait_for_metric(process.url, 'requests_total{route="other",status="400"} 1.0')
    wait_for_metric(process.url, 'errors_total{code="invalid_http"} 1.0')


def test_slow_reader_gets_its_whole_answer_at_shutdown(start: Callable[..., Process]) -> None:
    process = start().ready()
    reader = SlowReader(process.url)
    reader.wait_for_the_first_bytes()
    process.signal(signal.SIGTERM)
    process.wait_for_line("stopping")
    time.sleep(2.5)  # longer than uvicorn waits by itself
    head, _, body = reader.rest().partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None
    assert len(body) == int(length[1]) > 8_000_000
    assert process.exit_code() == 0


def test_every_answer_of_a_draining_server_closes_its_connection(start: Callable[..., Process]) -> None:
    process = start().ready()
    upload = SlowUpload(process.url)
    wait_for_metric(process.url, "requests_in_flight 2.0")
    with httpx.Client(base_url=process.url) as kept:
        assert "connection" not in kept.get("/healthz").headers
        process.signal(signal.SIGTERM)
        wait_until_unready(process.url)
        for path in ("/healthz", "/readyz", "/info", "/nowhere", "/metrics", "/openapi.json"):
            assert kept.get(path).headers["connection"] == "close"
    upload.finish()
    head = upload.head()
    assert head.startswith("http/1.1 200 ")
    assert "connection: close" in head.split("\r\n")
    assert process.exit_code() == 0


def test_second_signal_ends_the_process_at_once(start: Callable[..., Process]) -> None:
    process = start().ready()
    upload = SlowUpload(process.url)
    wait_for_metric(process.url, "requests_in_flight 2.0")
    process.signal(signal.SIGTERM)
    wait_until_unready(process.url)
    process.signal(signal.SIGTERM)
    assert process.exit_code() == -signal.SIGTERM
    assert upload.status() == 0


def test_unloadable_model_exits_with_1_and_one_line(start: Callable[..., Process], tmp_path: Path) -> None:
    process = start("--model", str(tmp_path), "--log-level", "error")
    assert process.exit_code() == 1
    [line] = process.log  # the level hides all other lines
    assert LINE.fullmatch(line)
    assert f"cannot load model {tmp_path.name}: " in line


def test_missing_device_exits_with_1_and_one_line(start: Callable[..., Process]) -> None:
    process = start("--device", "cuda:99", "--log-level", "error")
    assert process.exit_code() == 1
    [line] = process.log
    assert LINE.fullmatch(line)
    assert "cannot load model demo: device 'cuda:99' is not here" in line


def test_signal_while_loading_ends_the_process(start: Callable[..., Process], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")  # reading it never ends
    process = start("--model", str(tmp_path)).listening()
    assert httpx.get(f"{process.url}/readyz", timeout=60).json()["error"]["code"] == "not_ready"
    process.signal(signal.SIGTERM)
    assert process.exit_code() == 0
    assert "the process ends without it" in "\n".join(process.log)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_during_the_start_exits_with_0(start: Callable[..., Process], number: int) -> None:
    for delay_s in (0.0, 0.1, 1.0):
        process = start(is_anew=True).listening()
        time.sleep(delay_s)
        process.signal(number)
        assert process.exit_code() == 0
        assert not [line for line in process.log if "Traceback" in line]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--version"], 0), (["serve", "--help"], 0), (["serve", "--port", "many"], 2), (["serve", "--bad"], 2)],
)
def test_command_without_a_model_does_not_import_torch(arguments: list[str], code: int) -> None:
    script = (
        "import sys; from service.__main__ import main\n"
        "try: code = main(sys.argv[1:])\n"
        "except SystemExit as end: code = end.code\n"
        "sys.exit(99 if {'torch', 'numpy', 'PIL', 'fastapi'} & set(sys.modules) else code)"
    )
    command = [sys.executable, "-c", script, *arguments]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60).returncode == code


@pytest.mark.parametrize("api_servers", ["1", "2"])
def test_port_in_use_exits_with_1_and_one_line(start: Callable[..., Process], api_servers: str) -> None:
    with listen("127.0.0.1", 0) as taken:
        flags = ("--port", str(taken.getsockname()[1]), "--api-server-count", api_servers)
        process = start(*flags, is_anew=True)
        assert process.exit_code() == 1
    [line] = process.log
    assert "cannot listen on 127.0.0.1" in line
    assert "in use" in line


def test_bad_setting_exits_with_2_and_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["serve", "--port", "many"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"vision-sidecar: --port.*'many'.*\n", err)
    assert main(["serve", "--device=cpu", "--cudagraph-mm-encoder"]) == 2
    assert re.fullmatch(r"vision-sidecar: --cudagraph-mm-encoder .*--device cpu.*\n", capsys.readouterr().err)
    monkeypatch.setenv("VISION_SIDECAR_PORTT", "1")
    assert main(["serve"]) == 2
    assert "VISION_SIDECAR_PORTT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--version"], 0, "vision-sidecar "),
        (["--help"], 0, "serve"),
        (["serve", "--help"], 0, "VISION_SIDECAR_MAX_BODY_BYTES"),
        ([], 2, "a command is missing: serve or bench"),
        (["sing"], 2, "sing"),
        (["s" * 5000], 2, "ssss"),
        (["--vers"], 2, "--vers"),
        (["--a\nb"], 2, "--a b"),
    ],
)
def test_help_version_and_unknown_commands(
    arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == code
    captured = capsys.readouterr()
    assert text in (captured.err if code else captured.out)
    assert not code or re.fullmatch(r"vision-sidecar: .{1,250}\n", captured.err)


def test_address_is_a_url() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d+", address(listener))
    if socket.has_ipv6:
        with listen("::1", 0) as listener:
            assert re.fullmatch(r"http://\[::1\]:[1-9]\d+", address(listener))


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize(
    ("host", "answers"),
    [
        ("0.0.0.0", {"127.0.0.1"}),
        ("127.0.0.1", {"127.0.0.1"}),
        ("::", {"127.0.0.1", "::1"}),
        ("0::0", {"127.0.0.1", "::1"}),
        ("::1", {"::1"}),
    ],
)
def test_host_is_one_address_or_all(host: str, answers: set[str]) -> None:
    with listen(host, 0) as listener:
        reached = set()
        for asked in ("127.0.0.1", "::1"):
            with contextlib.suppress(OSError):
                socket.create_connection((asked, listener.getsockname()[1]), timeout=5).close()
                reached.add(asked)
    assert reached == answers


@pytest.mark.parametrize("host", ["a..b", "x" * 70, "name.invalid"])
def test_host_without_an_address_is_an_os_error(host: str) -> None:
    with pytest.raises(OSError):
        listen(host, 0)

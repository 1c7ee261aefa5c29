"""A real server from its first request to its end, with devices that the tests hold up."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client import CollectorRegistry

from models import DeviceError, EncodeItem
from service.__main__ import address, listen
from service.app import create_app
from service.config.settings import Settings
from service.engine.engine import Engine, State
from service.server import Server
from tests.support.app import FakeEncoder, encode_image, fake_replicas, only
from tests.support.process import SlowReader, SlowUpload
from tests.support.project import ROOT
from tests.support.waiting import eventually


class Running:
    """A server in its own thread, with a client that keeps connections open."""

    def __init__(
        self,
        settings: Settings,
        *encoders: FakeEncoder,
        load: Callable[[], object] = lambda: None,
        wait: bool = True,
    ) -> None:
        app = create_app(
            settings,
            registry=CollectorRegistry(),
            start_replicas=lambda settings: fake_replicas(*encoders, load=load),
        )
        self.engine: Engine = app.state.engine
        self._listener = listen("127.0.0.1", 0)
        self.url = address(self._listener)
        self._server = Server(app, settings)
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],))
        self._thread.start()
        self.client = httpx.Client(base_url=self.url, timeout=20)
        self._threads = ThreadPoolExecutor(8)
        if wait:
            eventually(lambda: self.engine.state is not State.LOADING)

    def embed(self) -> httpx.Response:
        return self.client.post("/embed", content=encode_image(), headers={"content-type": "image/png"})

    def embed_later(self) -> Callable[[], httpx.Response]:
        """Sends a request in another thread. Returns a function that waits for its answer."""
        return self._threads.submit(self.embed).result

    def stop(self) -> None:
        """Stops the server as the first signal would."""
        self._server.handle_exit(15, None)

    def has_ended(self, timeout_s: float = 10) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        if not self._server._told_to_stop:
            self.stop()
        assert self.has_ended()
        self.client.close()
        self._threads.shutdown()
        self._listener.close()


Start = Callable[..., Running]


@pytest.fixture
def start(settings: Settings) -> Iterator[Start]:
    running: list[Running] = []

    def start_server(
        *encoders: FakeEncoder,
        load: Callable[[], object] = lambda: None,
        wait: bool = True,
        **changes: float,
    ) -> Running:
        fakes = encoders or (FakeEncoder(),)
        running.append(Running(only(settings, **changes), *fakes, load=load, wait=wait))
        return running[-1]

    yield start_server
    for server in running:
        server.close()


def holding(gate: threading.Event) -> FakeEncoder:
    def hold(items: Sequence[EncodeItem]) -> None:
        gate.wait(20)

    return FakeEncoder(hold)


def failed_code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_requests_that_arrive_as_the_server_ends_are_answered(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On new connections that the server has not accepted, and on one that is kept open."""
    server = start()
    port = int(server.url.rsplit(":", 1)[1])
    clients = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(2)]
    head = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: image/png\r\ncontent-length: 3\r\n\r\n"
    clients[0].sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
    assert clients[0].recv(4096).startswith(b"HTTP/1.1 200 ")
    on_tick = server._server.on_tick

    async def send_at_the_end(counter: int) -> bool:
        is_over = await on_tick(counter)
        if is_over:
            clients.extend(socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(3))
            for client in clients:
                client.sendall(head + b"png")
        return is_over

    monkeypatch.setattr(server._server, "on_tick", send_at_the_end)
    server.stop()
    assert server.has_ended()
    assert len(clients) == 5
    for client in clients:
        with client, client.makefile("rb") as file:
            answer = file.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"connection: close\r\n" in answer
        assert b"draining" in answer
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=20)


def test_connections_without_a_request_end_without_a_reset(start: Start) -> None:
    server = start()
    port = int(server.url.rsplit(":", 1)[1])
    clients = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(2)]
    clients[0].sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
    assert clients[0].recv(4096).startswith(b"HTTP/1.1 200 ")
    server.stop()
    for client in clients:
        with client:
            assert client.recv(1) == b""
            client.sendall(b"GET /healthz HTTP/1.1\r\n")  # crosses the end
            time.sleep(0.05)
            client.sendall(b"host: x\r\n\r\n")
            assert client.recv(1) == b""
    assert server.has_ended()


def test_for_a_delay_it_is_unready_and_serves_on(start: Start) -> None:
    server = start(shutdown_delay_s=0.8)
    assert "connection" not in server.embed().headers
    server.stop()
    eventually(lambda: server.engine.state is State.LEAVING)
    for path in ("/readyz", "/health"):
        assert failed_code(server.client.get(path)) == (503, "draining")
    assert server.client.get("/healthz").status_code == 200
    answer = server.embed()
    assert (answer.status_code, answer.headers["connection"]) == (200, "close")
    assert server.has_ended()
    assert server.engine.state.name == "DRAINING"


def test_after_the_delay_new_requests_are_refused_and_accepted_ones_finish(
    start: Start, gate: threading.Event
) -> None:
    server = start(holding(gate), shutdown_delay_s=0.3)
    first = server.embed_later()
    eventually(lambda: server.engine.num_accepted == 1)
    server.stop()
    eventually(lambda: server.engine.state is State.LEAVING)
    second = server.embed_later()  # during the delay
    eventually(lambda: server.engine.num_accepted == 2)
    eventually(lambda: server.engine.state is State.DRAINING)
    newcomer = server.embed()
    assert failed_code(newcomer) == (503, "draining")
    assert (newcomer.headers["connection"], newcomer.headers["retry-after"]) == ("close", "5")
    assert not server.has_ended(0.1)
    gate.set()
    assert [answer().status_code for answer in (first, second)] == [200, 200]
    assert server.has_ended()


def test_without_a_delay_new_requests_are_refused_at_once(start: Start, gate: threading.Event) -> None:
    server = start(holding(gate))
    first = server.embed_later()
    eventually(lambda: server.engine.num_accepted == 1)
    server.stop()
    eventually(lambda: server.engine.state is State.DRAINING)
    assert failed_code(server.embed()) == (503, "draining")
    gate.set()
    assert first().status_code == 200
    assert server.has_ended()


def test_a_loading_server_stops_without_delay(start: Start, gate: threading.Event) -> None:
    server = start(load=gate.wait, wait=False, shutdown_delay_s=15)
    assert server.client.get("/healthz").status_code == 200
    assert failed_code(server.client.get("/readyz")) == (503, "not_ready")
    server.stop()
    assert server.has_ended()
    assert server.engine.state is State.DRAINING


def test_failure_of_the_device_watch_ends_the_server(settings: Settings) -> None:
    server = Running(settings.model_copy(update={"device_timeout_s": "none"}), FakeEncoder())
    assert server.has_ended()
    assert server.engine.state is State.FAILED
    server.close()


def test_a_stuck_device_fails_callers_and_probes_and_ends_the_server(
    start: Start, gate: threading.Event
) -> None:
    server = start(holding(gate), device_timeout_s=0.4)
    upload = SlowUpload(server.url)  # keeps the server from ending before the probes were asked
    eventually(lambda: server.engine.num_accepted == 1)
    waiting = [server.embed_later() for _ in range(5)]  # on the device, and behind it
    for answer in waiting:
        assert failed_code(answer()) == (503, "device_failed")
    for path in ("/healthz", "/readyz"):
        assert failed_code(server.client.get(path)) == (503, "device_failed")
    assert failed_code(server.embed()) == (503, "device_failed")
    upload.finish()
    assert upload.status() == 503
    assert server.has_ended()
    assert server.engine.state is State.FAILED
    gate.set()


def test_a_failed_server_closes_connections_after_the_next_answer(start: Start) -> None:
    server = start()
    upload = SlowUpload(server.url)
    eventually(lambda: server.engine.num_accepted == 1)
    assert "connection" not in server.client.get("/healthz").headers
    server.engine.batcher.lose("fake", DeviceError("fake", RuntimeError("gone")))
    answer = server.client.get("/healthz")
    assert (answer.status_code, answer.headers["connection"]) == (503, "close")
    upload.finish()
    assert upload.status() == 503


def test_with_one_stuck_device_the_others_finish_their_work(start: Start, gate: threading.Event) -> None:
    other_gate = threading.Event()
    server = start(holding(gate), holding(other_gate), device_timeout_s=0.5)
    answers = [server.embed_later() for _ in range(2)]
    eventually(lambda: server.engine.num_accepted == 2)
    time.sleep(0.2)
    other_gate.set()  # this device goes on
    statuses = sorted(answer().status_code for answer in answers)
    assert statuses in ([200, 503], [503, 503])  # the first may have taken both
    assert server.has_ended()
    assert server.engine.state is State.FAILED
    gate.set()


_PROCESS = """
import sys, threading
from dataclasses import replace
from functools import partial
import torch
from service import server
from service.__main__ import address, listen
from service.app import create_app
from service.config.settings import Settings
from tests.support.app import FakeEncoder, FakeRunning, fake_replicas

class Wide(FakeEncoder):  # its answers fill all buffers on the way to the client
    def launch(self, items):
        result = super().launch(items).wait()
        result = replace(result, embeddings=tuple(torch.zeros(2**20) for _ in items))
        return FakeRunning(lambda: result)

encoders = {"wide": Wide(), "stuck": FakeEncoder(lambda items: threading.Event().wait())}
replicas = fake_replicas(encoders[sys.argv[1]])
server.create_app = partial(create_app, start_replicas=lambda settings: replicas)
listener = listen("127.0.0.1", 0)
print(address(listener), flush=True)
settings = Settings(decode_threads=1, device_timeout_s=0.5)
server.run(settings.model_copy(update={"shutdown_grace_s": 0.3}), listener)
"""


@pytest.fixture
def start_process() -> Iterator[Callable[[str], tuple[subprocess.Popen[str], str]]]:
    """Starts a process with an encoder of `_PROCESS`. Returns it with its URL once it is ready."""
    running: list[subprocess.Popen[str]] = []

    def start(encoder: str) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-c", _PROCESS, encoder]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        running.append(process)
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        eventually(lambda: httpx.get(f"{url}/readyz").status_code == 200)
        return process, url

    yield start
    for process in running:
        process.kill()
        process.communicate()


StartProcess = Callable[[str], tuple[subprocess.Popen[str], str]]


def test_a_process_with_a_stuck_device_exits_with_1(start_process: StartProcess) -> None:
    process, url = start_process("stuck")
    answer = httpx.post(f"{url}/embed", content=encode_image(), headers={"content-type": "image/png"})
    assert failed_code(answer) == (503, "device_failed")
    assert process.wait(20) == 1


def test_unread_answer_is_cut_off_after_the_grace(start_process: StartProcess) -> None:
    process, url = start_process("wide")
    reader = SlowReader(url)
    reader.wait_for_the_first_bytes()
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in log
    reader.leave()


def test_unfinished_request_is_answered_after_the_grace(start_process: StartProcess) -> None:
    process, url = start_process("wide")
    upload = SlowUpload(url)
    eventually(lambda: "vision_sidecar_requests_in_flight 2.0" in httpx.get(f"{url}/metrics").text)
    process.send_signal(signal.SIGTERM)
    assert upload.status() == 503
    _, log = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "requests cut off: 1" in log
    assert "Traceback" not in log

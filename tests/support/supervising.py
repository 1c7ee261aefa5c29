"""A supervisor in this process; API servers are processes, and the test chooses the devices."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, cast

import httpx
import uvloop

from service.__main__ import address, listen
from service.config.settings import Settings
from service.processes.supervisor.members import Process, Spawn
from service.processes.supervisor.supervisor import Supervisor
from tests.support.forkserver import ForkedProcess
from tests.support.serving import HeldUpload, request_of
from tests.support.traffic import Answer, Scrape, call
from tests.support.waiting import eventually


def request_each(num_servers: int, method: str, url: str, **arguments: Any) -> list[httpx.Response]:
    """Sends a request to each API server: the connections stay open, and so each server gets one."""
    with ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(timeout=30)) for _ in range(num_servers)]
        return [client.request(method, url, **arguments) for client in clients]


class Supervised:
    """It runs in the main thread, which receives signals."""

    def __init__(self, settings: Settings, num_servers: int, spawn: Spawn) -> None:
        listener = listen("127.0.0.1", 0)
        self.url = address(listener)
        self.port: int = listener.getsockname()[1]
        self._supervisor = Supervisor(settings, listener, num_servers, spawn, device_end_s=0.5)
        self._threads = ThreadPoolExecutor(16)

    @property
    def processes(self) -> list[int]:
        """The process ids of the API servers."""
        return [server.process.pid for server in self._supervisor._servers]

    @property
    def device_processes(self) -> list[int]:
        return [device.process.pid for device in self._supervisor._devices.values()]

    @property
    def are_idle(self) -> list[int]:
        """For each device, 1 while other devices take it for idle."""
        return [*self._supervisor._idleness.buffer]

    def device(self, name: str) -> Process:
        return self._supervisor._devices[name].process

    def run(self, scenario: Callable[[], None]) -> int:
        """Runs until the server exits, and runs the scenario in another thread. Returns the exit code."""
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

    def wait_until_ready(self, timeout_s: float = 60) -> None:
        """Raises `TimeoutError`."""
        eventually(
            lambda: httpx.get(f"{self.url}/readyz", timeout=timeout_s).status_code == 200, timeout_s=timeout_s
        )

    @property
    def exit_codes(self) -> list[int | None]:
        """The exit codes of the API servers."""
        return [cast(ForkedProcess, server.process).returncode for server in self._supervisor._servers]

    def call_later(self, *levels: int) -> Future[Answer]:
        return self._threads.submit(lambda: asyncio.run(call(self.port, request_of(*levels))))

    def hold_each(self) -> list[HeldUpload]:
        """One request for each API server that keeps it from exiting until the request leaves."""
        self.settle()
        uploads = [HeldUpload(self.port) for _ in self.processes]
        eventually(lambda: self.scrape().total("requests_in_flight") == len(uploads) + 1)  # and the scrape
        return uploads

    def settle(self) -> None:
        """Waits until the connections of earlier requests are closed, so that the next are shared equally."""
        time.sleep(0.1)

    def scrape(self) -> Scrape:
        return Scrape(httpx.get(f"{self.url}/metrics").raise_for_status().text)

    def close(self) -> None:
        self._threads.shutdown()
        gc.unfreeze()
        for thing in gc.get_objects():  # here the process goes on
            if type(thing) is socket.socket and thing.type == socket.SOCK_SEQPACKET:
                thing.close()


# Starts a supervisor with the processes that its arguments ask for.
StartSupervisor = Callable[..., Supervised]

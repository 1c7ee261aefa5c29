"""Processes that are forked from one which has imported the service already.

For tests that are not about the start of a process: a new interpreter takes two seconds to import torch.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing import connection, reduction
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from service.__main__ import main
from service.processes.wire.link import Link
from service.processes.wire.messages import STOP_SIGNALS

_PRELOADED = [
    "service.server",
    "service.processes.supervisor.supervisor",
    "service.processes.api_server.api_server",
    "service.processes.device.device_process",
    "tests.support.forkserver",
]


class ForkedProcess:
    """One process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._process: ForkServerProcess = context.Process(target=target, args=arguments)
        self._process.start()
        self._lock = threading.Lock()  # of the exit code, which can be read once
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; for a signal, the negative number; None while the process runs."""
        with self._lock:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end and returns the exit code. Raises `TimeoutError`."""
        connection.wait([self._process.sentinel], timeout)
        code = self.returncode
        if code is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return code

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def serve(flags: list[str], environ: Mapping[str, str], out: Connection, err: Connection) -> ForkedProcess:
    """`vision-sidecar serve` in a process group of its own, which writes to these ends of pipes."""
    return ForkedProcess(_serve, flags, {**os.environ, **environ}, out, err)


def spawn(module: str, link: Link) -> ForkedProcess:
    """In place of `members.spawn`: calls `main` of a module with one end of a link."""
    return ForkedProcess(_run_main, module, link.socket, _File(2))


class _File:
    """An open file of this process, which may be an argument of a forked one."""

    def __init__(self, file: int) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return _open_again, (reduction.DupFd(self.file),)


def _open_again(duplicate: Any) -> _File:
    return _File(duplicate.detach())


def _serve(flags: list[str], environ: Mapping[str, str], out: Connection, err: Connection) -> None:
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environ)
    for end, file in ((out, 1), (err, 2)):
        os.dup2(end.fileno(), file)
        end.close()
    _with_log(lambda: sys.exit(main(["serve", *flags])))


def _run_main(module: str, link: socket.socket, err: _File) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    os.dup2(err.file, 2)
    os.close(err.file)
    _with_log(lambda: importlib.import_module(module).main(link.detach()))


def _with_log(run: Callable[[], None]) -> None:
    """Writes the whole log at the end, as the interpreter does, but not processes of `multiprocessing`."""
    try:
        run()
    finally:
        logging.shutdown()

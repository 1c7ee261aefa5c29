"""Processes that are forked from a process that has already imported the service.

Use them in tests that are not about the start of a process: a new interpreter imports torch for two seconds.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

from service.__main__ import main
from service.processes.wire.link import Link
from service.processes.wire.messages import STOP_SIGNALS

_PRELOADED = ["service.server", "service.processes.supervisor.supervisor", "tests.support.forkserver"]


class ForkedProcess:
    """A forked process with those methods of `subprocess.Popen` that tests use."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._process: ForkServerProcess = context.Process(target=target, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or the negative number of the signal that ended the process. None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit code. Raises `TimeoutError` after `timeout` seconds."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return code

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def serve(flags: list[str], environ: Mapping[str, str], out: Connection, err: Connection) -> ForkedProcess:
    """Runs `vision-sidecar serve` in its own process group. `out` and `err` are its stdout and stderr."""
    return ForkedProcess(_serve, flags, {**os.environ, **environ}, out, err)


def spawn(module: str, line: Link) -> ForkedProcess:
    """Replaces `members.spawn`: runs `main` of a module with its end of the line to the supervisor."""
    return ForkedProcess(_run_main, module, line.socket)


def _serve(flags: list[str], environ: Mapping[str, str], out: Connection, err: Connection) -> None:
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environ)
    for end, file in ((out, 1), (err, 2)):
        os.dup2(end.fileno(), file)
        end.close()
    sys.exit(main(["serve", *flags]))


def _run_main(module: str, line: socket.socket) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    importlib.import_module(module).main(line.detach())

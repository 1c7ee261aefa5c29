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
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

from service.__main__ import main
from service.processes.wire.link import Link
from service.processes.wire.messages import STOP_SIGNALS

_PRELOADED = ["service.server", "service.processes.supervisor.supervisor", "tests.support.forkserver"]


class ForkedProcess:
    """One process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._process: ForkServerProcess = context.Process(target=target, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; for a signal, the negative number; None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end and returns the exit code. Raises `TimeoutError`."""
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
    """`vision-sidecar serve` in a process group of its own, which writes to these ends of pipes."""
    return ForkedProcess(_serve, flags, {**os.environ, **environ}, out, err)


def spawn(module: str, line: Link) -> ForkedProcess:
    """In place of `members.spawn`: `main` of a module, with the end of a line."""
    return ForkedProcess(_run_main, module, line.socket)


def _serve(flags: list[str], environ: Mapping[str, str], out: Connection, err: Connection) -> None:
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environ)
    for end, file in ((out, 1), (err, 2)):
        os.dup2(end.fileno(), file)
        end.close()
    _with_log(lambda: sys.exit(main(["serve", *flags])))


def _run_main(module: str, line: socket.socket) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    _with_log(lambda: importlib.import_module(module).main(line.detach()))


def _with_log(run: Callable[[], None]) -> None:
    """Writes the whole log at the end, as the interpreter does, but not processes of `multiprocessing`."""
    try:
        run()
    finally:
        logging.shutdown()

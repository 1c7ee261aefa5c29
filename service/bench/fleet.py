"""The load processes of `bench serve`: started, let go together, stopped, their notes collected.

Knows processes and pipes; nothing of HTTP nor of what notes mean.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Self

from service.bench.load import Notes, Share, work

_HEAD_START_S = 0.1  # for the agreed time to reach all processes before it is over


class FleetError(Exception):
    """A load process that ended early."""


class Fleet:
    """Processes that send one share each. Leaving it ends them."""

    def __init__(self, shares: Sequence[Share]) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Pipe] = []
        # Ctrl-C reaches every process of a terminal. It is ours to stop the others, with their notes.
        with _ignored(signal.SIGINT):
            for share in shares:
                ours, theirs = context.Pipe()
                process = context.Process(target=work, args=(share, theirs), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()

    def start(self) -> float:
        """Waits until all are ready, lets them go, and returns when they start. Raises `FleetError`."""
        for pipe in self._pipes:
            self._receive(pipe)
        begin = time.monotonic() + _HEAD_START_S
        for pipe in self._pipes:
            pipe.send(begin)
        return begin

    def wait(self) -> None:
        """Waits until all have sent their share. May be interrupted, which loses nothing."""
        waiting = set(self._pipes)
        while waiting:
            waiting.difference_update(wait(list(waiting)))

    def stop(self) -> None:
        """Tells them to send no more and to wait for nothing."""
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # it has sent its share and is gone
                pipe.send(None)

    def collect(self) -> list[Notes]:
        """What all have noted, once they are done. Raises `FleetError`."""
        return [notes for pipe in self._pipes if (notes := self._receive(pipe)) is not None]

    def _receive(self, pipe: Pipe) -> Notes | None:
        try:
            received: Notes | None = pipe.recv()
        except (EOFError, OSError):
            raise FleetError("a load process ended early") from None
        return received


@contextmanager
def _ignored(number: int) -> Iterator[None]:
    """Ignores a signal; processes that are started meanwhile go on ignoring it."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)

"""The load processes of `bench serve`: started together, stopped, and their notes collected.

Knows processes and pipes. Knows nothing of HTTP or of the meaning of notes.
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

_HEAD_START_S = 0.1  # the common start reaches all processes before it has passed


class FleetError(Exception):
    """A load process ended before its notes were received."""


class Fleet:
    """Processes that send one share each. Leaving the context ends them."""

    def __init__(self, shares: Sequence[Share]) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Pipe] = []
        # Ctrl-C reaches every process of a terminal. Only this one acts on it: it stops the others and
        # receives their notes.
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
        """Waits until all are ready, and tells them when to start. Returns that time. Raises `FleetError`."""
        for pipe in self._pipes:
            self._receive(pipe)
        begin = time.monotonic() + _HEAD_START_S
        for pipe in self._pipes:
            pipe.send(begin)
        return begin

    def wait(self) -> None:
        """Waits until all have sent their share. An interruption loses no notes."""
        waiting = set(self._pipes)
        while waiting:
            waiting.difference_update(wait(list(waiting)))

    def stop(self) -> None:
        """Tells all to stop at once, without waiting for answers."""
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # it has sent its share and ended
                pipe.send(None)

    def collect(self) -> list[Notes]:
        """Waits for the notes of all processes. Raises `FleetError`."""
        return [notes for pipe in self._pipes if (notes := self._receive(pipe)) is not None]

    def _receive(self, pipe: Pipe) -> Notes | None:
        try:
            received: Notes | None = pipe.recv()
        except (EOFError, OSError):
            raise FleetError("a load process ended early") from None
        return received


@contextmanager
def _ignored(number: int) -> Iterator[None]:
    """Ignores a signal. Processes that start meanwhile ignore it to their end."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)

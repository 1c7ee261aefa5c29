"""Encoders that fail or hold, and servers around them."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from models import EncodeItem
from service.config.settings import Settings
from tests.support.app import FakeEncoder, FakeRunning
from tests.support.serving import Served, call_all, embeddings_of
from tests.support.traffic import Answer

Serve = Callable[..., Served]


# Batches are small, so that there are many.
SETTINGS = Settings(decode_threads=2, max_batch_tokens=24, max_queue_tokens=4096, cache_bytes=0)


def slowly(items: Sequence[EncodeItem]) -> None:
    time.sleep(0.003)


class Held:
    """Holds the batches of a fake encoder until the gate opens. With `error`, the first batch then fails."""

    def __init__(self, gate: threading.Event, error: BaseException | None = None) -> None:
        self.is_at_work = threading.Event()
        self._gate = gate
        self._error = error

    def __call__(self, items: Sequence[EncodeItem]) -> None:
        self.is_at_work.set()
        while not self._gate.is_set():  # runs Python, so that `kill` can raise an exception here
            time.sleep(0.001)
        if self._error is not None:
            error, self._error = self._error, None
            raise error


class FailingAtLaunch(FakeEncoder):
    """Fails in the launching thread, as happens when memory for activations runs out."""

    def launch(self, items: Sequence[EncodeItem]) -> FakeRunning:
        self._fail(items)
        return super().launch(items)


def complaints(log: pytest.LogCaptureFixture) -> list[str]:
    """The log lines from WARNING upwards, except the warning of every demo server."""
    return [
        record.getMessage()
        for record in log.records
        if record.levelno >= logging.WARNING and not record.getMessage().startswith("model demo")
    ]


def check_answered(answers: Sequence[Answer], requests: Sequence[Sequence[int]]) -> None:
    for answer, levels in zip(answers, requests, strict=True):
        assert (answer.status, answer.body) == (200, answer.body)
        assert answer.embeddings == embeddings_of(*levels)


def requests(number: int, *, seed: int = 0, levels: range = range(1, 250)) -> list[list[int]]:
    """Requests of one to three images of random gray levels."""
    rng = random.Random(seed)
    return [rng.choices(levels, k=rng.choice([1, 1, 2, 3])) for _ in range(number)]


class InBackground:
    """Sends all requests at once. `answers` waits for their answers."""

    def __init__(self, port: int, requests: Sequence[Sequence[int]]) -> None:
        self.requests = requests
        self._pool = ThreadPoolExecutor(1)
        self._answers = self._pool.submit(asyncio.run, call_all(port, requests))

    def answers(self) -> list[Answer]:
        answers = self._answers.result(30)
        self._pool.shutdown()
        return answers

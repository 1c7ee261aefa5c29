"""Callers that send requests until the server stops, with checks of their answers."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from models import VisionEncoder
from tests.support.process import SlowUpload
from tests.support.traffic import Answer, call, png, post

FAULT = re.compile(r" (WARNING|ERROR|CRITICAL) (?!service.app: model demo)")


def known_images() -> list[tuple[bytes, list[float]]]:
    """Images of various sizes with their embeddings, each encoded alone."""
    encoder = VisionEncoder.from_pretrained("demo", device="cpu", dtype=torch.float32)
    rng = np.random.default_rng(3)
    found = []
    for _ in range(12):
        height, width = rng.integers(40, 400, 2)
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        [tokens] = encoder.encode([encoder.preprocess(pixels)])
        mean = tokens[:, : encoder.hidden_size].mean(dim=0)
        found.append((png(pixels), (mean / mean.norm()).tolist()))
    return found


class Signalled(Protocol):
    """A server that can be told to stop."""

    url: str

    def signal(self, number: int) -> None: ...


def port_of(process: Signalled) -> int:
    return int(process.url.rsplit(":", 1)[1])


def check_embeddings(answer: Answer, expected: Sequence[Sequence[float]]) -> None:
    assert (answer.status, answer.code) == (200, None)
    np.testing.assert_allclose(answer.embeddings, expected, atol=1e-5)


class Load:
    """Callers that send requests until the server refuses connections."""

    def __init__(
        self, process: Signalled, known: Sequence[tuple[bytes, list[float]]], delay_s: float
    ) -> None:
        self._process = process
        self._known = known
        self._delay_s = delay_s
        self._stopped_at: float | None = None
        self._rng = random.Random(6)
        self.answers: list[tuple[float, Answer]] = []  # with the time when it was asked for

    @property
    def refuses_from(self) -> float:
        """The time before which no request may be refused."""
        return float("inf") if self._stopped_at is None else self._stopped_at + self._delay_s

    async def stop_the_server(self) -> None:
        """Stops the server under load. With a delay, a late request keeps the server for a while."""
        callers = [asyncio.create_task(self._keep_calling()) for _ in range(8)]
        while len(self.answers) < 20:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self._stopped_at = time.monotonic()
        self._process.signal(signal.SIGTERM)
        if self._delay_s:
            await asyncio.sleep(self._delay_s / 2)
            upload = SlowUpload(self._process.url)
            await asyncio.sleep(self._delay_s)
            upload.finish()
            assert await asyncio.to_thread(upload.status) == 200
        await asyncio.gather(*callers)

    async def _keep_calling(self) -> None:
        while True:
            image, vector = self._rng.choice(self._known)
            sent_at = time.monotonic()
            try:
                answer = await call(port_of(self._process), post(image))
            except ConnectionRefusedError:
                assert sent_at > self.refuses_from
                return  # no request that was accepted is reset or left without an answer
            if answer.status == 200:
                check_embeddings(answer, [vector])
            else:
                await asyncio.sleep(0.1)  # each is a line in a pipe that is read at the end only
            self.answers.append((sent_at, answer))

"""An encoder whose batches end when a test lets them, and images for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from models import BatchResult, BatchStats, EncodeItem, OutputSpec, Patches, Replica

DEVICE_FAULT = torch.AcceleratorError("illegal memory access")


class Running:
    """A batch that was launched."""

    def __init__(self, encoder: HeldEncoder, items: Sequence[EncodeItem]) -> None:
        self._encoder = encoder
        self._items = items
        self._started_at = time.perf_counter()

    def wait_for_device(self) -> None:
        encoder = self._encoder
        encoder.finish_threads.append(threading.get_ident())
        assert encoder.may_finish.wait(10), "the test never set `may_finish`"
        encoder.num_running -= 1
        if encoder.fail_wait is not None:
            raise encoder.fail_wait

    def collect(self) -> BatchResult:
        items = self._items
        embeddings = tuple(torch.tensor([number_of(item)]) for item in items)
        num_tokens = sum(item.patches.num_tokens for item in items)
        stats = BatchStats("own name", len(items), num_tokens, len(items), {}, {64: 1}, 0, 0.1)
        return BatchResult(embeddings, (stats,), self._started_at, time.perf_counter())


class HeldEncoder:
    """Returns the number of each image as its embedding. Batches end once `may_finish` is set."""

    def __init__(
        self, *, fail_launch: BaseException | None = None, fail_wait: BaseException | None = None
    ) -> None:
        self.launches: list[list[float]] = []  # numbers of the images of each batch
        self.launch_threads: list[int] = [threading.get_ident()]
        self.finish_threads: list[int] = []
        self.may_finish = threading.Event()
        self.may_finish.set()
        self.num_running = 0
        self.max_running = 0
        self.fail_launch = fail_launch
        self.fail_wait = fail_wait
        self.fault: BaseException | None = None  # raised by `check_device`

    def check_device(self) -> None:
        if self.fault is not None:
            raise self.fault

    def launch(self, items: Sequence[EncodeItem]) -> Any:
        self.launch_threads.append(threading.get_ident())
        self.launches.append([number_of(item) for item in items])
        if self.fail_launch is not None:
            raise self.fail_launch
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        return Running(self, items)


def image(number: int, rows: int = 4) -> EncodeItem:
    pixels = torch.full((rows, 1), number, dtype=torch.uint8)
    return EncodeItem(Patches(pixels, (1, 2, rows // 2), rows // 4), OutputSpec())


def number_of(item: EncodeItem) -> float:
    return float(item.patches.pixels[0, 0])


def numbers(result: BatchResult) -> list[float]:
    return [float(embedding) for embedding in result.embeddings]


MakeReplica = Callable[..., Replica]  # from a `HeldEncoder`, and a name

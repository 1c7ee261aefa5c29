"""The batches that `bench encoder` encodes: random pixels, at sizes that are fixed or drawn with a seed.

Knows sizes and patches. Knows nothing of devices or of timing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from models import Patches, Preprocessor

Timing = Literal["device", "whole"]
MIX = ((20, 20), (24, 32), (32, 32), (32, 32), (40, 40), (48, 48), (48, 48), (64, 64))  # grids in patches
TRACE = ((94, 94), (124, 124), (156, 156), (188, 188), (206, 230), (250, 250))  # published percentiles


@dataclass(frozen=True)
class Workload:
    """Batches of grids (height, width) in patches, in the order in which they are encoded."""

    name: str
    batches: tuple[tuple[tuple[int, int], ...], ...]
    num_warmup: int  # first batches, which are not counted
    timing: Timing  # `device`: without a pause between batches; `whole`: waits for each, host work included

    def images(self, preprocessor: Preprocessor, *, pin_memory: bool = False) -> Iterator[list[Patches]]:
        """Random pixels for each batch. Images are views of one array, which keeps memory small.

        `pin_memory` allocates them like `VisionEncoder.preprocess` does for a GPU.
        """
        config = preprocessor.config
        largest = max(height * width for batch in self.batches for height, width in batch)
        rng = np.random.default_rng(0)
        pixels = torch.from_numpy(
            rng.integers(0, 256, (largest + 4096, 3 * config.patch_size**2), dtype=np.uint8)
        )
        pixels = pixels.pin_memory() if pin_memory else pixels
        for batch in self.batches:
            starts = rng.integers(0, 4096, len(batch)).tolist()
            yield [
                Patches(pixels[at : at + h * w], (1, h, w), h * w // config.merge_size**2)
                for at, (h, w) in zip(starts, batch, strict=True)
            ]


def make_workload(name: str, preprocessor: Preprocessor, repeats: int | None = None) -> Workload:
    """Makes a workload by its name. `repeats` sets the number of counted batches and limits the warm-up.

    `trace`: single images at the 10th to 99th percentile of a published production trace of this encoder.
    `random-mm`: requests of 20 images of 336 x 336. `stream`: single images of sizes that are usual in chats.
    Raises `KeyError`.
    """
    if name == "stream":
        return _stream(preprocessor, 3000 if repeats is None else repeats)
    if name == "random-mm":
        request = (_grid(preprocessor, 336, 336),) * 20
        count = 1000 if repeats is None else repeats
        num_warmup = min(20, count)
        return Workload(name, (request,) * (num_warmup + count), num_warmup, "whole")
    count = 30 if repeats is None else repeats
    if name == "trace":
        batches = tuple((grid,) for grid in TRACE)
        return Workload(name, batches * (1 + max(1, count // 6)), len(TRACE), "device")
    batch = MIX if name == "mix" else _square(preprocessor, name)
    return Workload(name, (batch,) * (count + 3), 3, "device")


WORKLOADS = ("1x336", "4x336", "20x336", "1x1024", "1x2048", "mix", "trace", "random-mm", "stream")


def _square(preprocessor: Preprocessor, name: str) -> tuple[tuple[int, int], ...]:
    if name not in WORKLOADS:
        raise KeyError(name)
    count, side = map(int, name.split("x"))
    return (_grid(preprocessor, side, side),) * count


def _grid(preprocessor: Preprocessor, height: int, width: int) -> tuple[int, int]:
    return preprocessor.grid_thw(height, width)[1:]


def _stream(preprocessor: Preprocessor, count: int) -> Workload:
    rng = np.random.default_rng(42)
    batches = []
    num_warmup = min(300, count)
    for _ in range(num_warmup + count):
        side, ratio = np.exp(rng.normal(np.log(600), 0.25)), np.exp(rng.normal(0, 0.3))
        width, height = (int(np.clip(round(x), 32, 4096)) for x in (side * ratio, side / ratio))
        batches.append((_grid(preprocessor, height, width),))
    return Workload("stream", tuple(batches), num_warmup, "whole")

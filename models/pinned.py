"""Pinned host memory of one device.

torch keeps the pinned memory of all devices in one cache, which asks every device for its events whenever
memory is wanted. So a device that is lost would fail the others' batches, and each would look lost itself.
Blocks here stay with their device, and with the process, whoever forgets them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch

_MIN_BYTES = 2**12


class Reached(Protocol):
    """An event of a device."""

    def query(self) -> bool:
        """Whether the device has come to it. Raises what went wrong on the device."""


class PinnedPool:
    """Threads may share it. On a CPU the memory is ordinary."""

    def __init__(self, device: torch.device) -> None:
        self._pins = device.type == "cuda"
        self._lock = threading.Lock()
        self._free: list[tuple[torch.Tensor, Reached | None]] = []
        self._all: list[torch.Tensor] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """A block [>= num_bytes] of uint8: the smallest that is free, else a new one, a power of two."""
        with self._lock:
            fitting = [
                (len(block), place)
                for place, (block, after) in enumerate(self._free)
                if len(block) >= num_bytes and (after is None or after.query())
            ]
            if fitting:
                return self._free.pop(min(fitting)[1])[0]
            size = max(_MIN_BYTES, 1 << (num_bytes - 1).bit_length())
            self._all.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._pins))
            return self._all[-1]

    def give_back(self, block: torch.Tensor, after: Reached | None = None) -> None:
        """Makes a block free, once the device has reached the event."""
        with self._lock:
            self._free.append((block, after))


def view_of(block: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The first bytes of a block as a tensor."""
    return block[: prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))

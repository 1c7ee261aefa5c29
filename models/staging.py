"""Host memory → a graph's live input buffers.

On CUDA through pinned memory and a stream of its own, in two slots, so that the copies of the next sub-batch
run beside the replay of this one. Elsewhere the live buffers are written directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

import torch

from models.protocol import EncoderCudaGraphConfig, HostBuffers

Fill = Callable[[HostBuffers], None]


@dataclass(frozen=True, eq=False)
class Buffers:
    """Input rows and metadata in one kind of memory, large enough for the largest budget."""

    input: torch.Tensor
    metadata: Mapping[str, torch.Tensor]

    @classmethod
    def allocate(
        cls,
        config: EncoderCudaGraphConfig,
        num_rows: int,
        num_images: int,
        device: torch.device,
        pinned: bool,
    ) -> Buffers:
        """Zeroed buffers."""

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)

        return cls(
            zeros((num_rows, *config.input_shape), config.input_dtype),
            {name: zeros((num_images, *spec.shape), spec.dtype) for name, spec in config.metadata.items()},
        )

    def head(self, num_rows: int, num_images: int) -> Buffers:
        """Views of the first rows and slots."""
        return Buffers(self.input[:num_rows], {name: x[:num_images] for name, x in self.metadata.items()})

    def copy_(self, source: Buffers, num_rows: int) -> None:
        """Copies the first rows of the input and all slots of the metadata."""
        self.input[:num_rows].copy_(source.input[:num_rows], non_blocking=True)
        for name, target in self.metadata.items():
            target.copy_(source.metadata[name][: len(target)], non_blocking=True)


class Staging(Protocol):
    def load(self, live: Buffers, num_rows: int, fill: Fill) -> None:
        """Brings what `fill` writes into the first rows of the live buffers, on the current stream."""
        ...


class DirectStaging:
    """For devices whose memory the host writes."""

    def load(self, live: Buffers, num_rows: int, fill: Fill) -> None:
        _fill(live, num_rows, fill)


class PinnedStaging:
    """For CUDA. Live buffers are written on the stream that replays, so that no running replay is raced."""

    def __init__(
        self, config: EncoderCudaGraphConfig, num_rows: int, num_images: int, device: torch.device
    ) -> None:
        self._stream = torch.cuda.Stream(device)
        self._slots = cycle([_Slot(config, num_rows, num_images, device) for _ in range(2)])
        self._stream.wait_stream(torch.cuda.current_stream(device))  # which zeroes the slots

    def load(self, live: Buffers, num_rows: int, fill: Fill) -> None:
        slot = next(self._slots)
        slot.uploaded.synchronize()  # the slot's host memory is free again
        _fill(slot.host, num_rows, fill)
        compute = torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(slot.consumed)
            slot.device.copy_(slot.host, num_rows)
            slot.uploaded.record(self._stream)
        compute.wait_event(slot.uploaded)
        live.copy_(slot.device, num_rows)
        slot.consumed.record(compute)


class _Slot:
    def __init__(
        self, config: EncoderCudaGraphConfig, num_rows: int, num_images: int, device: torch.device
    ) -> None:
        self.host = Buffers.allocate(config, num_rows, num_images, torch.device("cpu"), pinned=True)
        self.device = Buffers.allocate(config, num_rows, num_images, device, pinned=False)
        self.uploaded = torch.cuda.Event(blocking=True)  # the host sleeps for it
        self.consumed = torch.cuda.Event()


def _fill(buffers: Buffers, num_rows: int, fill: Fill) -> None:
    for array in buffers.metadata.values():
        array.zero_()
    fill(HostBuffers(buffers.input[:num_rows], buffers.metadata))

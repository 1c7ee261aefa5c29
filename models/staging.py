"""Where the model writes a batch, and how it gets from there into a graph's live input buffers.

On CUDA rows are written into device memory, on a stream of their own and in two slots, so that one sub-batch
is uploaded while the replay of another runs; they have no copy on the host. Elsewhere the live buffers are
written directly. Knows nothing of what is in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

import torch

from models.cudagraph_protocol import EncoderCudaGraphConfig, ReplayBuffers

Metadata = Mapping[str, torch.Tensor]
Fill = Callable[[ReplayBuffers], None]


@dataclass(frozen=True, eq=False)
class Buffers:
    """Input rows and metadata on one device."""

    input: torch.Tensor
    metadata: Metadata

    @classmethod
    def allocate(
        cls, config: EncoderCudaGraphConfig, num_rows: int, num_images: int, device: torch.device
    ) -> Buffers:
        """Zeroed buffers."""
        rows = torch.zeros((num_rows, *config.input_shape), dtype=config.input_dtype, device=device)
        return cls(rows, _metadata(config, num_images, device))

    def head(self, num_rows: int, num_images: int) -> Buffers:
        """Views of the first rows and slots."""
        return Buffers(self.input[:num_rows], {name: x[:num_images] for name, x in self.metadata.items()})

    def copy_(self, source: Buffers) -> None:
        """Copies all rows of the source's input, and metadata into all slots."""
        self.input[: len(source.input)].copy_(source.input, non_blocking=True)
        for name, target in self.metadata.items():
            target.copy_(source.metadata[name][: len(target)], non_blocking=True)


def _metadata(
    config: EncoderCudaGraphConfig, num_images: int, device: torch.device, pinned: bool = False
) -> Metadata:
    return {
        name: torch.zeros((num_images, *spec.shape), dtype=spec.dtype, device=device, pin_memory=pinned)
        for name, spec in config.metadata.items()
    }


def _write(fill: Fill, rows: torch.Tensor, metadata: Metadata) -> None:
    for array in metadata.values():
        array.zero_()
    fill(ReplayBuffers(rows, metadata))


class Staging(Protocol):
    def load(self, live: Buffers, num_rows: int, fill: Fill) -> None:
        """Brings what `fill` writes into the first rows of the live buffers, on the current stream."""
        ...

    def wait(self) -> None:
        """Returns once all that was loaded has been read, and may be changed again."""
        ...


class DirectStaging:
    """For devices whose memory the host writes."""

    def load(self, live: Buffers, num_rows: int, fill: Fill) -> None:
        _write(fill, live.input[:num_rows], live.metadata)

    def wait(self) -> None:
        """It has been read already."""


class CudaStaging:
    """Live buffers are written on the stream that replays, so that no running replay is raced."""

    def __init__(
        self, config: EncoderCudaGraphConfig, num_rows: int, num_images: int, device: torch.device
    ) -> None:
        self._uploads = _Uploads(device)
        self._slots = cycle(
            [(_Slot(config, num_rows, num_images, device), torch.cuda.Event(blocking=True)) for _ in range(2)]
        )
        self._uploads.stream.wait_stream(torch.cuda.current_stream(device))  # which zeroes the slots

    def load(self, live: Buffers, num_rows: int, fill: Fill) -> None:
        slot, consumed = next(self._slots)
        # The host waits, asleep, and not the upload stream: a copy from memory that is not pinned would wait
        # for that stream and burn a core meanwhile.
        consumed.synchronize()
        compute = torch.cuda.current_stream()
        with torch.cuda.stream(self._uploads.stream):
            written = slot.write(fill, num_rows)
        compute.wait_stream(self._uploads.stream)
        live.copy_(written)
        consumed.record(compute)

    def wait(self) -> None:
        self._uploads.wait()


class Uploader:
    """Brings batches into device memory of their exact size, for eager runs."""

    def __init__(self, config: EncoderCudaGraphConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._uploads = _Uploads(device) if device.type == "cuda" else None

    def upload(self, num_rows: int, num_images: int, fill: Fill) -> Buffers:
        """What `fill` writes, for the current stream. On CUDA the copies do not wait for that stream."""
        if self._uploads is None:
            buffers = Buffers.allocate(self._config, num_rows, num_images, self._device)
            _write(fill, buffers.input, buffers.metadata)
            return buffers
        compute = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._uploads.stream):
            written = _Slot(self._config, num_rows, num_images, self._device).write(fill, num_rows)
        compute.wait_stream(self._uploads.stream)
        for tensor in (written.input, *written.metadata.values()):
            tensor.record_stream(compute)
        return written

    def wait(self) -> None:
        """Returns once what was uploaded has been read, and may be changed again."""
        if self._uploads is not None:
            self._uploads.wait()


class _Uploads:
    """A stream for them, and the wait for its end, asleep."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._end = torch.cuda.Event(blocking=True)

    def wait(self) -> None:
        self._end.record(self.stream)
        self._end.synchronize()


class _Slot:
    """Room for a batch on a GPU: rows are written where they stay, metadata on the host first."""

    def __init__(
        self, config: EncoderCudaGraphConfig, num_rows: int, num_images: int, device: torch.device
    ) -> None:
        self._device = Buffers.allocate(config, num_rows, num_images, device)
        self._host = _metadata(config, num_images, torch.device("cpu"), pinned=True)

    def write(self, fill: Fill, num_rows: int) -> Buffers:
        """Views of what was written, on the current stream.

        Metadata is uploaded last, so that none is on its way if `fill` fails.
        """
        written = Buffers(self._device.input[:num_rows], self._device.metadata)
        _write(fill, written.input, self._host)
        for name, array in written.metadata.items():
            array.copy_(self._host[name], non_blocking=True)
        return written

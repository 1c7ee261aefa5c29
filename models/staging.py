"""The memory that the model writes a batch into, and the copy from there into a graph's live input buffers.

On CUDA, rows are written straight into device memory, on a separate stream and into one of two slots. So one
sub-batch is uploaded while the replay of another runs. On other devices the live buffers are written
directly. Knows nothing of the content of a batch.
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
        """Allocates zeroed buffers."""
        rows = torch.zeros((num_rows, *config.input_shape), dtype=config.input_dtype, device=device)
        return cls(rows, _metadata(config, num_images, device))

    def head(self, num_rows: int, num_images: int) -> Buffers:
        """Returns views of the first rows and slots."""
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
        """Calls `fill` and brings the rows into the first rows of the live buffers, on the current stream."""
        ...

    def wait(self) -> None:
        """Returns once all loaded images have been read and may be changed."""
        ...


class DirectStaging:
    """For devices whose memory the host can write."""

    def load(self, live: Buffers, num_rows: int, fill: Fill) -> None:
        _write(fill, live.input[:num_rows], live.metadata)

    def wait(self) -> None:
        """Does nothing: `load` has read the images."""


class CudaStaging:
    """For CUDA. Live buffers are written on the stream of the replays, so never during a replay."""

    def __init__(
        self, config: EncoderCudaGraphConfig, num_rows: int, num_images: int, device: torch.device
    ) -> None:
        self._uploads = _Uploads(device)
        self._slots = cycle(
            [(_Slot(config, num_rows, num_images, device), torch.cuda.Event(blocking=True)) for _ in range(2)]
        )
        self._uploads.stream.wait_stream(torch.cuda.current_stream(device))  # it zeroes the slots

    def load(self, live: Buffers, num_rows: int, fill: Fill) -> None:
        slot, consumed = next(self._slots)
        # The host waits, asleep. If the upload stream waited instead, a copy from memory that is not pinned
        # would wait for that stream and keep a core busy.
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
    """Brings a batch into device memory of its exact size, for eager runs."""

    def __init__(self, config: EncoderCudaGraphConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._uploads = _Uploads(device) if device.type == "cuda" else None

    def upload(self, num_rows: int, num_images: int, fill: Fill) -> Buffers:
        """Returns the buffers that `fill` wrote, for use on the current stream.

        On CUDA the copies do not wait for the work on that stream.
        """
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
        """Returns once all uploaded images have been read and may be changed."""
        if self._uploads is not None:
            self._uploads.wait()


class _Uploads:
    """A stream for uploads. `wait` lets the host sleep until they are done."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._end = torch.cuda.Event(blocking=True)

    def wait(self) -> None:
        self._end.record(self.stream)
        self._end.synchronize()


class _Slot:
    """Memory for a batch on a GPU. Rows are written on the device, metadata on the host first."""

    def __init__(
        self, config: EncoderCudaGraphConfig, num_rows: int, num_images: int, device: torch.device
    ) -> None:
        self._device_buffers = Buffers.allocate(config, num_rows, num_images, device)
        self._host_metadata = _metadata(config, num_images, torch.device("cpu"), pinned=True)

    def write(self, fill: Fill, num_rows: int) -> Buffers:
        """Returns views of the buffers that `fill` wrote, for use on the current stream.

        Metadata is uploaded last, so that no upload is running if `fill` fails.
        """
        written = Buffers(self._device_buffers.input[:num_rows], self._device_buffers.metadata)
        _write(fill, written.input, self._host_metadata)
        for name, array in written.metadata.items():
            array.copy_(self._host_metadata[name], non_blocking=True)
        return written

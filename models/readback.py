"""Tokens on the device → what each caller asked for, on the host.

Pooling, columns and dtype are done on the device, for all images of a sub-batch that ask for the same at
once. On CUDA results come through pinned memory on a stream of their own, beside the work of the next batch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

from models.cudagraph import EncoderCounts
from models.kernels import Kernels
from models.outputs import BatchResult, BatchStats, EncodeItem, OutputSpec
from models.streams import DeviceStream, Mark


@dataclass(frozen=True, eq=False)
class Part:
    """Results of some images of a batch, packed in one tensor."""

    indices: tuple[int, ...]  # places in the batch
    rows: torch.Tensor  # [sum(lengths), columns], no view of a graph's buffers
    lengths: tuple[int, ...] | None  # rows of each image; None: pooled, one vector each


def select_outputs(
    tokens: torch.Tensor,
    indices: Sequence[int],
    items: Sequence[EncodeItem],
    kernels: Kernels,
    dtype: torch.dtype,
) -> Iterator[Part]:
    """What the images at `indices`, whose tokens [levels, tokens, hidden] stand in that order, ask for."""
    lengths = [items[index].patches.num_tokens for index in indices]
    ends = [0, *accumulate(lengths)]
    places: dict[OutputSpec, list[int]] = defaultdict(list)
    for place, index in enumerate(indices):
        places[items[index].output].append(place)
    means: torch.Tensor | None = None
    for output, group in places.items():
        chosen = tuple(indices[place] for place in group)
        if output.pooled:
            if means is None:
                means = kernels.mean_rows(tokens[0], _to_device(ends, tokens.device))
            if len(group) < len(indices):
                vectors = means.index_select(0, _to_device(group, tokens.device))
            else:
                vectors = means
            vectors = F.normalize(vectors, dim=1) if output.normalize else vectors
            yield Part(chosen, vectors.to(output.dtype or dtype), None)
        else:
            levels = tokens if output.deepstack else tokens[:1]
            if len(group) < len(indices):
                levels = torch.cat([levels[:, ends[place] : ends[place + 1]] for place in group], dim=1)
            rows = torch.cat(tuple(levels), dim=1)  # [tokens, width]
            own = tuple(lengths[place] for place in group)
            yield Part(chosen, rows.to(output.dtype or dtype), own)


def warm_up_outputs(kernels: Kernels, hidden_size: int, device: torch.device, dtype: torch.dtype) -> None:
    """Compiles at the start the one kernel of `select_outputs` that is not torch's own."""
    kernels.mean_rows(torch.zeros(1, hidden_size, dtype=dtype, device=device), _to_device([0, 1], device))


def _to_device(values: list[int], device: torch.device) -> torch.Tensor:
    on_host = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def _copies(part: Part) -> tuple[torch.Tensor, ...]:
    """Out of pinned memory, which the device needs again, and ordinary tensors on every device.

    Tokens get a storage for each image, so that one answer does not keep the memory of all; vectors, which
    are small, share theirs.
    """
    if part.lengths is None:
        return part.rows.clone().unbind(0)
    return tuple(rows.clone() for rows in part.rows.split(part.lengths))


class RunningBatch:
    """A batch that was launched. One thread launches it, the same or another waits for it."""

    def __init__(self, num_images: int, stream: DeviceStream) -> None:
        self._num_images = num_images
        self._stream = stream
        self._parts: list[Part] = []
        self._started_at = time.perf_counter()
        self._started: Mark | None = None

    def begin(self) -> None:
        """The device's work begins here, unless it has begun."""
        if self._started is None:
            self._started = Mark(self._stream.cuda)

    def read_back(self, part: Part) -> None:
        """Takes results over, before the next replay overwrites what they came from."""
        compute, download = self._stream.cuda, self._stream.download
        if compute is None or download is None:
            self._parts.append(part)
            return
        download.wait_stream(compute)
        with torch.cuda.stream(download):
            pinned = torch.empty(part.rows.shape, dtype=part.rows.dtype, pin_memory=True)
            pinned.copy_(part.rows, non_blocking=True)
            part.rows.record_stream(download)
        self._parts.append(Part(part.indices, pinned, part.lengths))

    def launched(self, counts: EncoderCounts, *, num_tokens: int) -> None:
        """Ends the launching: nothing is read back any more."""
        self._counts = counts
        self._num_tokens = num_tokens
        self._computed = Mark(self._stream.cuda)
        self._downloaded = Mark(self._stream.download)

    def wait(self) -> BatchResult:
        """Both of the following."""
        self.wait_for_device()
        return self.collect()

    def wait_for_device(self) -> None:
        """Returns once the device has finished. Raises what went wrong on it."""
        self._computed.wait()
        self._downloaded.wait()

    def collect(self) -> BatchResult:
        """The results, after `wait_for_device`."""
        embeddings: dict[int, torch.Tensor] = {}
        for part in self._parts:
            embeddings.update(zip(part.indices, _copies(part), strict=True))
        self._parts.clear()
        return BatchResult(
            tuple(embeddings[index] for index in range(self._num_images)),
            (self._stats(),),
            self._started_at,
            time.perf_counter(),
        )

    def _stats(self) -> BatchStats:
        return BatchStats(
            device=str(self._stream.device),
            num_images=self._num_images,
            num_tokens=self._num_tokens,
            hits=self._counts.hits,
            misses=dict(self._counts.misses),
            replays=dict(self._counts.replays),
            padding_tokens=self._counts.padding_tokens,
            busy_s=0.0 if self._started is None else self._computed.seconds_since(self._started),
        )

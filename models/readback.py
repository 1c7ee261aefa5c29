"""Turns tokens on the device into the output that is requested for each image, on the host.

Pooling, choice of columns and conversion run on the device, at once for all images of a sub-batch with the
same `OutputSpec`. On CUDA, results are copied into pinned memory on a separate stream, while the next batch
runs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F

from models.cudagraph import EncoderCounts
from models.kernels import Kernels
from models.outputs import BatchResult, BatchStats, EncodeItem, OutputSpec
from models.streams import DeviceStream, Mark
from models.token_sinks import TokenWriting, write_tokens


@dataclass(frozen=True, eq=False)
class OutputGroup:
    """Results of the images of a sub-batch with the same `OutputSpec`, packed in one tensor."""

    indices: tuple[int, ...]  # places in the batch
    rows: torch.Tensor  # [sum(lengths), columns], not a view of a graph's buffers
    lengths: tuple[int, ...] | None  # rows of each image; None: pooled, one vector each
    # [rows], the largest magnitude in each row, for a single image whose rows go to a sink
    peaks: torch.Tensor | None = None


def select_outputs(
    tokens: torch.Tensor,
    indices: Sequence[int],
    items: Sequence[EncodeItem],
    kernels: Kernels,
    dtype: torch.dtype,
) -> Iterator[OutputGroup]:
    """Yields the outputs of the images at `indices`. `tokens` [levels, tokens, hidden] is in that order."""
    lengths = [items[index].patches.num_tokens for index in indices]
    ends = [0, *accumulate(lengths)]
    places: dict[tuple[OutputSpec, bool], list[int]] = defaultdict(list)
    for place, index in enumerate(indices):
        places[items[index].output, items[index].sink is not None].append(place)
    means: torch.Tensor | None = None
    for (output, has_sink), group in places.items():
        chosen = tuple(indices[place] for place in group)
        if output.pooled:
            if means is None:
                means = kernels.mean_rows(tokens[0], _to_device(ends, tokens.device))
            if len(group) < len(indices):
                vectors = means.index_select(0, _to_device(group, tokens.device))
            else:
                vectors = means
            vectors = F.normalize(vectors, dim=1) if output.normalize else vectors
            yield OutputGroup(chosen, vectors.to(output.dtype or dtype), None)
        else:
            levels = tokens if output.deepstack else tokens[:1]
            if len(group) < len(indices):
                levels = torch.cat([levels[:, ends[place] : ends[place + 1]] for place in group], dim=1)
            rows = torch.cat(tuple(levels), dim=1).to(output.dtype or dtype)  # [tokens, width]
            own = tuple(lengths[place] for place in group)
            if has_sink:
                pairs = zip(rows.split(own), _peaks(rows).split(own), strict=True)
                for index, (image_rows, peaks) in zip(chosen, pairs, strict=True):
                    yield OutputGroup((index,), image_rows, (len(peaks),), peaks)
            else:
                yield OutputGroup(chosen, rows, own)


def warm_up_outputs(kernels: Kernels, hidden_size: int, device: torch.device, dtype: torch.dtype) -> None:
    """Compiles the only kernel of `select_outputs` that does not come with torch. Called at start."""
    kernels.mean_rows(torch.zeros(1, hidden_size, dtype=dtype, device=device), _to_device([0, 1], device))


def _peaks(rows: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in each row, without a copy of the rows. Infinity and NaN show in it."""
    peaks: torch.Tensor = torch.linalg.vector_norm(rows, float("inf"), dim=1)
    return peaks


def _to_device(values: list[int], device: torch.device) -> torch.Tensor:
    on_host = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def _to_pinned(tensor: torch.Tensor, download: torch.cuda.Stream) -> torch.Tensor:
    """Starts the copy to pinned memory on the current stream, which is `download`."""
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    tensor.record_stream(download)
    return pinned


def _copies(group: OutputGroup) -> tuple[torch.Tensor, ...]:
    """Copies results out of pinned memory, which the device reuses.

    Each image's tokens get their own storage, so that one result does not keep the memory of all others.
    Vectors are small and share a storage. Of rows for a sink only the largest magnitude is a result.
    """
    if group.lengths is None:
        return group.rows.clone().unbind(0)
    if group.peaks is not None:
        return (group.peaks.max().float().reshape(1),)
    return tuple(rows.clone() for rows in group.rows.split(group.lengths))


class RunningBatch:
    """A batch that was launched. Any thread may wait for it."""

    def __init__(
        self, num_images: int, stream: DeviceStream, writings: Mapping[int, TokenWriting] = {}
    ) -> None:
        """`writings`: by the place of the image in the batch, where its tokens go in place of its result."""
        self._num_images = num_images
        self._writings = writings
        self._stream = stream
        self._groups: list[OutputGroup] = []
        self._started_at = time.perf_counter()
        self._started: Mark | None = None

    def begin(self) -> None:
        """Marks the begin of the device's work, if it is not marked yet."""
        if self._started is None:
            self._started = Mark(self._stream.cuda)

    def read_back(self, group: OutputGroup) -> None:
        """Starts the copy of results to the host. Call it before the next replay overwrites the tokens."""
        compute, download = self._stream.cuda, self._stream.download
        if compute is None or download is None:
            self._groups.append(group)
            return
        download.wait_stream(compute)
        with torch.cuda.stream(download):
            rows = _to_pinned(group.rows, download)
            peaks = None if group.peaks is None else _to_pinned(group.peaks, download)
        self._groups.append(replace(group, rows=rows, peaks=peaks))

    def launched(self, counts: EncoderCounts, *, num_tokens: int) -> None:
        """Ends the launching: nothing is read back any more."""
        self._counts = counts
        self._num_tokens = num_tokens
        self._computed = Mark(self._stream.cuda)
        self._downloaded = Mark(self._stream.download)

    def wait(self) -> BatchResult:
        """Waits for the device, then collects the results."""
        self.wait_for_device()
        return self.collect()

    def wait_for_device(self) -> None:
        """Returns once the device has finished. Raises errors of the device."""
        try:
            self._computed.wait()
            self._downloaded.wait()
        except BaseException:
            self.discard()
            raise

    def collect(self) -> BatchResult:
        """Returns the results. Called after `wait_for_device`. Raises the errors of sinks."""
        embeddings: dict[int, torch.Tensor] = {}
        for group in self._groups:
            embeddings.update(zip(group.indices, _copies(group), strict=True))
        try:
            write_tokens(
                [
                    (self._writings[group.indices[0]], group.rows)
                    for group in self._groups
                    if group.peaks is not None and embeddings[group.indices[0]].isfinite().item()
                ]
            )
        finally:
            self.discard()
        self._groups.clear()
        return BatchResult(
            tuple(embeddings[index] for index in range(self._num_images)),
            (self._stats(),),
            self._started_at,
            time.perf_counter(),
        )

    def discard(self) -> None:
        """Drops the tokens that did not reach their sinks. Called if the batch failed."""
        for writing in self._writings.values():
            writing.discard()

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

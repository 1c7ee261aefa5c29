"""CUDA graphs of a vision encoder's whole forward pass: capture at start, greedy packing, replay.

The design is that of vLLM's encoder CUDA graphs (pull request 35963), with finer budgets. Everything that is
particular to a model sits behind `SupportsEncoderCudaGraph`. Knows nothing of patches, pooling or requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol

import torch

from models.errors import ModelError
from models.packing import BudgetError, check_budgets, check_max_images, infer_budgets, infer_max_images, plan
from models.protocol import Batch, HostBuffers, SupportsEncoderCudaGraph
from models.staging import Buffers, DirectStaging, PinnedStaging, Staging

logger = logging.getLogger(__name__)

_CAPTURE = threading.Lock()  # capture of one device at a time: capturing changes allocators of the process
_IMAGES_BETWEEN_LOGS = 100_000


@dataclass(frozen=True)
class CudaGraphSettings:
    """How budgets are chosen, and whether all may run eagerly where the attention backend allows no graph."""

    token_budgets: tuple[int, ...] = ()  # empty: inferred from the model's range
    budget_steps: int = 8  # inferred budgets per octave; 1 gives powers of two
    max_images_per_batch: int = 0  # 0: inferred
    required: bool = True  # False: run eagerly with a backend that no graph can hold


class Graph(Protocol):
    """What was captured."""

    def replay(self) -> None: ...


class EagerGraph:
    """Stands in for a CUDA graph on other devices: a replay calls the forward pass on the same buffers."""

    def __init__(self, forward: Callable[[], None]) -> None:
        self._forward = forward

    def replay(self) -> None:
        self._forward()


@dataclass(frozen=True, eq=False)
class BudgetGraphMetadata:
    """One captured budget, with its views of the buffers that all budgets share."""

    token_budget: int
    max_batch_size: int
    graph: Graph
    input_buffer: torch.Tensor
    metadata_buffers: Mapping[str, torch.Tensor]
    output_buffer: torch.Tensor


@dataclass
class EncoderCounts:
    """What ran, by image; replays by budget; tokens that were computed for nothing."""

    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)  # by reason: oversize, disabled, error
    replays: Counter[int] = field(default_factory=Counter)
    padding_tokens: int = 0

    def add(self, other: EncoderCounts) -> None:
        self.hits += other.hits
        self.misses += other.misses
        self.replays += other.replays
        self.padding_tokens += other.padding_tokens


# Takes the images' places in the batch and their tokens, which the next replay overwrites.
Consume = Callable[[Sequence[int], torch.Tensor], None]


class EncoderCudaGraphManager(Generic[Batch]):
    """Graphs of one model on one device. Used by one thread, on one stream.

    Without settings no graph is captured and every image runs eagerly, for the reason `disabled`.
    """

    def __init__(
        self, model: SupportsEncoderCudaGraph[Batch], settings: CudaGraphSettings | None, device: torch.device
    ) -> None:
        self.model = model
        self.device = device
        self.counts = EncoderCounts()
        self.graphs: dict[int, BudgetGraphMetadata] = {}
        self.capture_seconds = 0.0
        self.memory_bytes = 0
        self._config = model.get_encoder_cudagraph_config()
        smallest, largest = model.get_encoder_cudagraph_budget_range()
        self._smallest = smallest
        if settings is None:
            self.budgets: tuple[int, ...] = (largest,)
            self.max_images = largest // smallest
        else:
            self.budgets, self.max_images = _resolve(settings, smallest, largest)
        # No budget has slots for more images than it could hold.
        self._slots = {budget: min(self.max_images, budget // smallest) for budget in self.budgets}
        if settings is not None:
            self._capture_all()
            self._test_all()
        elif self._is_cuda:
            # Compiles kernels, so that the first request neither waits for that nor finds out that it fails.
            model.encoder_eager_forward(model.prepare_encoder_cudagraph_capture_inputs(smallest, 1))
            torch.cuda.synchronize(device)

    # Capture

    def _capture_all(self) -> None:
        """Captures every budget, largest first, into one pool and on one set of buffers."""
        with _CAPTURE:
            started, before = time.perf_counter(), self._used_memory()
            self._allocate()
            self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None
            for number, budget in enumerate(reversed(self.budgets), 1):
                at, used = time.perf_counter(), self._used_memory()
                try:
                    self.graphs[budget] = self._capture(budget)
                except torch.OutOfMemoryError:
                    raise self._too_large(budget) from None
                logger.info(
                    "captured %d of %d: %d tokens, %.2f s, %.0f MiB",
                    number,
                    len(self.budgets),
                    budget,
                    time.perf_counter() - at,
                    (self._used_memory() - used) / 2**20,
                )
            self.capture_seconds = time.perf_counter() - started
            self.memory_bytes = self._used_memory() - before
        logger.info(
            "captured %d budgets of %d to %d tokens in %.1f s, %.0f MiB",
            len(self.budgets),
            self.budgets[0],
            self.budgets[-1],
            self.capture_seconds,
            self.memory_bytes / 2**20,
        )

    def _allocate(self) -> None:
        config, largest = self._config, self.budgets[-1]
        rows = largest * config.input_rows_per_token
        try:
            self._live = Buffers.allocate(config, rows, self.max_images, self.device, pinned=False)
            shape = list(config.output_shape)
            shape.insert(config.output_token_axis, largest)
            self._output = torch.zeros(shape, dtype=config.output_dtype, device=self.device)
            self._staging: Staging = (
                PinnedStaging(config, rows, self.max_images, self.device)
                if self._is_cuda
                else DirectStaging()
            )
        except torch.OutOfMemoryError:
            raise self._too_large(largest) from None

    def _capture(self, budget: int) -> BudgetGraphMetadata:
        slots = self._slots[budget]
        live = self._live.head(budget * self._config.input_rows_per_token, slots)
        output = self._output.narrow(self._config.output_token_axis, 0, budget)
        self._load(self.model.prepare_encoder_cudagraph_capture_inputs(budget, slots), live)

        def forward() -> None:
            self.model.encoder_cudagraph_forward(live.input, live.metadata, output)

        forward()  # compiles kernels and chooses algorithms, which a capture must not do
        graph = self._record(forward) if self._is_cuda else EagerGraph(forward)
        return BudgetGraphMetadata(budget, slots, graph, live.input, live.metadata, output)

    def _record(self, forward: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        # Other threads may allocate or pin memory meanwhile; only this one's calls are captured.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            forward()
        finally:
            graph.capture_end()
        return graph

    def _too_large(self, budget: int) -> ModelError:
        """Says which budget would fit, by trying."""
        self.graphs.clear()
        for candidate in (x for x in reversed(infer_budgets(self._smallest, budget, 1)) if x < budget):
            torch.cuda.empty_cache()
            try:
                self.model.encoder_eager_forward(
                    self.model.prepare_encoder_cudagraph_capture_inputs(candidate, 1)
                )
            except torch.OutOfMemoryError:
                continue
            advice = f"budgets up to about {candidate // 2} tokens would fit"
            break
        else:
            advice = "not even the smallest fits"
        free = torch.cuda.mem_get_info(self.device)[0] / 2**30 if self._is_cuda else 0.0
        return ModelError(
            f"no memory for a graph of {budget} tokens ({free:.1f} GiB are free): {advice}; "
            "set encoder_cudagraph_token_budgets, lower max_pixels, or turn cudagraph_mm_encoder off"
        )

    def _test_all(self) -> None:
        """Every budget must give what an eager run gives, on random input."""
        for budget, graph in self.graphs.items():
            batch = self.model.prepare_encoder_cudagraph_capture_inputs(budget, graph.max_batch_size)
            expected = self.model.encoder_eager_forward(batch).float()
            error = _relative_error(self._replay(graph, batch).float(), expected)
            if not error <= self._config.max_relative_error:
                raise ModelError(
                    f"the graph of {budget} tokens differs from an eager run by {error:.3g}, "
                    f"and {self._config.max_relative_error:.3g} is allowed; turn cudagraph_mm_encoder off"
                )

    # Run

    def run(self, batch: Batch, consume: Consume) -> EncoderCounts:
        """Encodes a batch in sub-batches and hands each one's tokens to `consume`.

        Out of memory and errors before a launch fall back to an eager run; a fault of the device is raised.
        """
        num_tokens = self.model.get_encoder_cudagraph_per_item_output_tokens(batch)
        packed = plan(num_tokens, self._slots)
        counts = EncoderCounts()
        for budget, indices in packed.replays:
            part = self._part(batch, indices, len(num_tokens))
            if not self.graphs:
                self._run_eagerly(part, indices, consume, counts, "disabled")
                continue
            try:
                tokens = self._replay(self.graphs[budget], part)
            except torch.AcceleratorError:
                raise  # the device itself
            except RuntimeError as error:
                logger.warning("a batch of %d images runs eagerly: %s", len(indices), error)
                self._run_eagerly(part, indices, consume, counts, "error")
                continue
            consume(indices, tokens)
            counts.hits += len(indices)
            counts.replays[budget] += 1
            counts.padding_tokens += budget - sum(num_tokens[index] for index in indices)
        for index in packed.oversize:
            part = self._part(batch, (index,), len(num_tokens))
            self._run_eagerly(part, (index,), consume, counts, "oversize" if self.graphs else "disabled")
        self._count(counts)
        return counts

    def execute(self, batch: Batch) -> list[torch.Tensor]:
        """The tokens of each image, in the batch's order; the axis of tokens is where the model has it."""
        axis = self._config.output_token_axis
        num_tokens = self.model.get_encoder_cudagraph_per_item_output_tokens(batch)
        results: dict[int, torch.Tensor] = {}

        def keep(indices: Sequence[int], tokens: torch.Tensor) -> None:
            lengths = [num_tokens[index] for index in indices]
            results.update(zip(indices, tokens.clone().split(lengths, dim=axis), strict=True))

        self.run(batch, keep)
        return [results[index] for index in range(len(num_tokens))]

    def _part(self, batch: Batch, indices: Sequence[int], num_items: int) -> Batch:
        if len(indices) == num_items and list(indices) == sorted(indices):
            return batch
        return self.model.select_encoder_cudagraph_items(batch, indices)

    def _replay(self, graph: BudgetGraphMetadata, batch: Batch) -> torch.Tensor:
        num_tokens = sum(self.model.get_encoder_cudagraph_per_item_output_tokens(batch))
        self._load(batch, Buffers(graph.input_buffer, graph.metadata_buffers))
        graph.graph.replay()
        return graph.output_buffer.narrow(self._config.output_token_axis, 0, num_tokens)

    def _load(self, batch: Batch, live: Buffers) -> None:
        def fill(buffers: HostBuffers) -> None:
            self.model.prepare_encoder_cudagraph_replay_buffers(batch, buffers)

        self._staging.load(live, sum(self.model.get_encoder_cudagraph_per_item_input_sizes(batch)), fill)

    def _run_eagerly(
        self, batch: Batch, indices: Sequence[int], consume: Consume, counts: EncoderCounts, reason: str
    ) -> None:
        consume(indices, self.model.encoder_eager_forward(batch))
        counts.misses[reason] += len(indices)

    def _count(self, counts: EncoderCounts) -> None:
        before = (self.counts.hits + self.counts.misses.total()) // _IMAGES_BETWEEN_LOGS
        self.counts.add(counts)
        if (self.counts.hits + self.counts.misses.total()) // _IMAGES_BETWEEN_LOGS > before:
            logger.info(
                "%d images by replay, eagerly %s, %d tokens of padding",
                self.counts.hits,
                dict(self.counts.misses),
                self.counts.padding_tokens,
            )

    @property
    def _is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def _used_memory(self) -> int:
        """Bytes of the device that are taken, by the driver's own objects too."""
        if not self._is_cuda:
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free


def _resolve(settings: CudaGraphSettings, smallest: int, largest: int) -> tuple[tuple[int, ...], int]:
    try:
        if settings.token_budgets:
            budgets = check_budgets(settings.token_budgets, smallest)
        else:
            budgets = infer_budgets(smallest, largest, settings.budget_steps)
        if settings.max_images_per_batch:
            return budgets, check_max_images(settings.max_images_per_batch, budgets, smallest)
        return budgets, infer_max_images(budgets, smallest)
    except BudgetError as error:
        raise ModelError(str(error)) from None


def _relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value - expected).norm() / expected.norm())

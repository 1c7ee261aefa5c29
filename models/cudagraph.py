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
from typing import Any, Generic, Protocol

import torch
from tqdm import tqdm

from models.errors import ModelError
from models.packing import (
    BudgetError,
    check_budgets,
    check_max_images,
    infer_budgets,
    infer_max_images,
    infer_warm_up,
    plan,
)
from models.protocol import Batch, ReplayBuffers, SupportsEncoderCudaGraph
from models.staging import Buffers, CudaStaging, DirectStaging, Staging
from models.warm_up import warm_up

logger = logging.getLogger(__name__)

_ONE_START = threading.Lock()  # one device at a time: compilers, captures and caches are the process's
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


@dataclass(frozen=True, eq=False)
class _Shared:
    """What all budgets share, as large as the largest needs it."""

    live: Buffers
    output: torch.Tensor
    staging: Staging
    pool: Any  # a handle of torch's, whose type is private


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
        self._smallest, self._largest = smallest, largest
        if settings is None:
            self.budgets: tuple[int, ...] = (largest,)
            self.max_images = largest // smallest
        else:
            self.budgets, self.max_images = _resolve(settings, smallest, largest)
        self._slots = {budget: self._num_slots(budget) for budget in self.budgets}
        self._shared: _Shared | None = None
        self._at = self.budgets[-1]  # the budget that is being captured or tested
        if settings is not None:
            self._start()
        else:
            self._warm_up(above=0)

    # Start

    def _start(self) -> None:
        """Captures every budget and tests it. Devices of a process capture in turn, and test side by side."""
        try:
            with _ONE_START:
                self._capture_all()
            for graph in self.graphs.values():
                self._at = graph.token_budget
                self._test(graph)
        except torch.OutOfMemoryError:
            pass  # left first: the error holds on to what the failed forward pass allocated
        else:
            self._warm_up(above=self.budgets[-1])
            self._empty_cache()
            return
        with _ONE_START:
            raise self._too_large(self._at)

    def _capture_all(self) -> None:
        """Largest first, into one pool and on one set of buffers."""
        started = time.perf_counter()
        self._empty_cache()  # what others left there would be counted as given back by the graphs
        before = self._reserved_memory()
        self._shared = self._allocate(self._at)
        for budget in tqdm(self.budgets[::-1], "capturing", unit="graph", disable=None, leave=False):
            self._at = budget
            at, used = time.perf_counter(), self._reserved_memory()
            self.graphs[budget] = self._capture(budget, self._shared)
            seconds, memory = time.perf_counter() - at, self._reserved_memory() - used
            logger.info("captured %d tokens in %.2f s, %.0f MiB", budget, seconds, memory / 2**20)
        self.capture_seconds = time.perf_counter() - started
        self.memory_bytes = self._reserved_memory() - before
        logger.info(
            "captured %d budgets of %d to %d tokens in %.1f s, %.0f MiB",
            len(self.budgets),
            self.budgets[0],
            self.budgets[-1],
            self.capture_seconds,
            self.memory_bytes / 2**20,
        )

    def _warm_up(self, above: int) -> None:
        """Compiles what images of more tokens need."""
        if self._is_cuda:
            with _ONE_START:
                warm_up(self.model, infer_warm_up(self._smallest, self._largest, above))
                torch.cuda.synchronize(self.device)

    def _allocate(self, largest: int) -> _Shared:
        config = self._config
        rows = largest * config.input_rows_per_token
        shape = list(config.output_shape)
        shape.insert(config.output_token_axis, largest)
        return _Shared(
            live=Buffers.allocate(config, rows, self.max_images, self.device),
            output=torch.zeros(shape, dtype=config.output_dtype, device=self.device),
            staging=CudaStaging(config, rows, self.max_images, self.device)
            if self._is_cuda
            else DirectStaging(),
            pool=torch.cuda.graph_pool_handle() if self._is_cuda else None,
        )

    def _capture(self, budget: int, shared: _Shared) -> BudgetGraphMetadata:
        slots = self._num_slots(budget)
        live = shared.live.head(budget * self._config.input_rows_per_token, slots)
        output = shared.output.narrow(self._config.output_token_axis, 0, budget)
        self._load(self.model.prepare_encoder_cudagraph_capture_inputs(budget, slots), live, shared)

        def forward() -> None:
            self.model.encoder_cudagraph_forward(live.input, live.metadata, output)

        forward()  # compiles kernels and chooses algorithms, which a capture must not do
        graph = self._record(forward, shared) if self._is_cuda else EagerGraph(forward)
        return BudgetGraphMetadata(budget, slots, graph, live.input, live.metadata, output)

    def _record(self, forward: Callable[[], None], shared: _Shared) -> Graph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        self._empty_cache()  # of the warm-up's memory, which the allocator would not give to the capture
        # Other threads may allocate or pin memory meanwhile; only this one's calls are captured.
        graph.capture_begin(pool=shared.pool, capture_error_mode="thread_local")
        try:
            forward()
        finally:
            graph.capture_end()
        return graph

    def _num_slots(self, budget: int) -> int:
        """No budget has slots for more images than it could hold."""
        return min(self.max_images, budget // self._smallest)

    def _too_large(self, budget: int) -> ModelError:
        """Says which budget fits, by capturing it."""
        smaller = [tokens for tokens in infer_budgets(self._smallest, budget, 1) if tokens < budget]
        fitting = next(filter(self._fits, reversed(smaller)), None)
        advice = "not even the smallest fits" if fitting is None else f"budgets up to {fitting} tokens fit"
        return ModelError(
            f"no memory for a graph of {budget} tokens; {advice}: set encoder_cudagraph_token_budgets, lower "
            "max_pixels, or turn cudagraph_mm_encoder off"
        )

    def _fits(self, budget: int) -> bool:
        self.graphs.clear()
        self._shared = None
        self._empty_cache()
        try:
            self._capture(budget, self._allocate(budget))
        except torch.OutOfMemoryError:
            return False
        return True

    def _test(self, graph: BudgetGraphMetadata) -> None:
        """Compares a graph with an eager run on random input: full, and with slots and rows left over.

        The second run has one image of half a budget: attention over longer ones would be most of the start.
        """
        budget = graph.token_budget
        for tokens, images in ((budget, graph.max_batch_size), (max(self._smallest, budget // 2), 1)):
            batch = self.model.prepare_encoder_cudagraph_capture_inputs(tokens, images)
            expected = self.model.encoder_eager_forward(batch).float()
            self._load(batch, Buffers(graph.input_buffer, graph.metadata_buffers))
            error = _relative_error(self._replay(graph, tokens).float(), expected)
            if not error <= self._config.max_relative_error:
                raise ModelError(
                    f"the graph of {budget} tokens differs from an eager run by {error:.3g}, "
                    f"and {self._config.max_relative_error:.3g} is allowed; turn cudagraph_mm_encoder off"
                )

    # Run

    def run(self, batch: Batch, consume: Consume, begin: Callable[[], None] = lambda: None) -> EncoderCounts:
        """Encodes a batch in sub-batches and hands each one's tokens to `consume`.

        `begin` is called before each one's work is given to the device, behind the copies of its input.

        A sub-batch that cannot be loaded falls back to an eager run; a fault of the device is raised.
        """
        num_tokens = self.model.get_encoder_cudagraph_per_item_output_tokens(batch)
        packed = plan(num_tokens, self._slots)
        counts = EncoderCounts()
        for budget, indices in packed.replays:
            part = self._part(batch, indices, len(num_tokens))
            if not self.graphs:
                begin()
                self._run_eagerly(part, indices, consume, counts, "disabled")
                continue
            graph = self.graphs[budget]
            if not self._loaded(part, graph, len(indices)):
                begin()
                self._run_eagerly(part, indices, consume, counts, "error")
                continue
            begin()
            used = sum(num_tokens[index] for index in indices)
            tokens = self._replay(graph, used)
            consume(indices, tokens)
            counts.hits += len(indices)
            counts.replays[budget] += 1
            counts.padding_tokens += budget - used
        for index in packed.oversize:
            part = self._part(batch, (index,), len(num_tokens))
            begin()
            self._run_eagerly(part, (index,), consume, counts, "oversize" if self.graphs else "disabled")
        if self._shared is not None:
            self._shared.staging.wait()
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

    def _loaded(self, batch: Batch, graph: BudgetGraphMetadata, num_images: int) -> bool:
        """Whether the batch is in the graph's buffers. What a failed attempt allocated is free again."""
        try:
            self._load(batch, Buffers(graph.input_buffer, graph.metadata_buffers))
        except torch.AcceleratorError:
            raise  # the device itself
        except Exception as error:
            # As text: who keeps the record would keep the error's frames.
            logger.warning("a batch of %d images runs eagerly: %s", num_images, str(error))
            return False
        return True

    def _replay(self, graph: BudgetGraphMetadata, num_tokens: int) -> torch.Tensor:
        """The first tokens of the graph's output, after it ran on what was loaded."""
        graph.graph.replay()
        return graph.output_buffer.narrow(self._config.output_token_axis, 0, num_tokens)

    def _load(self, batch: Batch, live: Buffers, shared: _Shared | None = None) -> None:
        shared = shared or self._shared
        assert shared is not None, "there are no buffers without graphs"

        def fill(buffers: ReplayBuffers) -> None:
            self.model.prepare_encoder_cudagraph_replay_buffers(batch, buffers)

        shared.staging.load(live, sum(self.model.get_encoder_cudagraph_per_item_input_sizes(batch)), fill)

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

    def _reserved_memory(self) -> int:
        """Bytes of the device that this process's allocator holds."""
        return torch.cuda.memory_reserved(self.device) if self._is_cuda else 0

    def _empty_cache(self) -> None:
        if self._is_cuda:
            torch.cuda.empty_cache()


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

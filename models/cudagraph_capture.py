"""Capture of encoder CUDA graphs at start: every budget is captured and compared with an eager run.

If memory is short, the error says which budget would fit. Knows nothing of how batches are packed and run
later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic

import torch
from tqdm import tqdm

from models.budgets import infer_budgets, num_slots
from models.cudagraph_budget import (
    BudgetGraphMetadata,
    EagerGraph,
    Graph,
    SharedBuffers,
    load_batch,
    replay,
)
from models.cudagraph_protocol import BatchT, SupportsEncoderCudaGraph
from models.errors import ModelError
from models.staging import Buffers, Staging
from models.warm_up import START_LOCK

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class CapturedGraphs:
    """The graphs of all budgets on one device, and their cost."""

    graphs: dict[int, BudgetGraphMetadata]  # by token budget, largest first
    staging: Staging
    seconds: float
    memory_bytes: int


class _OutOfMemory(Exception):
    """The device has no memory to capture or test `token_budget`."""

    def __init__(self, token_budget: int) -> None:
        super().__init__(token_budget)
        self.token_budget = token_budget


def capture_graphs(
    model: SupportsEncoderCudaGraph[BatchT], budgets: Sequence[int], max_images: int, device: torch.device
) -> CapturedGraphs:
    """Captures and tests a graph for each of the ascending budgets, in one pool and on one set of buffers.

    Raises `ModelError` if memory is short, or if a graph differs from an eager run.
    """
    capture = _Capture(model, max_images, device)
    try:
        return capture.capture_and_test(budgets)
    except _OutOfMemory as error:
        too_large = error.token_budget
    # Outside of `except`, because the error holds the memory that the failed attempt allocated.
    with START_LOCK:
        raise capture.too_large(too_large)


class _Capture(Generic[BatchT]):
    """Captures graphs of one model on one device."""

    def __init__(
        self, model: SupportsEncoderCudaGraph[BatchT], max_images: int, device: torch.device
    ) -> None:
        self._model = model
        self._max_images = max_images
        self._device = device
        self._config = model.get_encoder_cudagraph_config()
        self._smallest_image, _ = model.get_encoder_cudagraph_budget_range()

    def capture_and_test(self, budgets: Sequence[int]) -> CapturedGraphs:
        """Captures every budget, then tests each. Devices capture one after the other and test side by side.

        Raises `_OutOfMemory`, or `ModelError` if a graph differs from an eager run.
        """
        with START_LOCK:
            captured = self._capture_all(budgets)
        for graph in captured.graphs.values():
            with _memory_for(graph.token_budget):
                self._test(graph, captured.staging)
        return captured

    def _capture_all(self, budgets: Sequence[int]) -> CapturedGraphs:
        """Captures the largest budget first, so that the others fit into its memory."""
        started = time.perf_counter()
        empty_cache(
            self._device
        )  # else memory that others left there would count as given back by the graphs
        before = _reserved_memory(self._device)
        with _memory_for(budgets[-1]):
            shared = self._allocate(budgets[-1])
        graphs = {}
        for budget in tqdm(budgets[::-1], "capturing", unit="graph", disable=None, leave=False):
            with _memory_for(budget):
                graphs[budget] = self._capture_one(budget, shared)
        seconds = time.perf_counter() - started
        memory_bytes = _reserved_memory(self._device) - before
        logger.info(
            "captured %d budgets of %d to %d tokens in %.1f s, %.0f MiB",
            len(budgets),
            budgets[0],
            budgets[-1],
            seconds,
            memory_bytes / 2**20,
        )
        return CapturedGraphs(graphs, shared.staging, seconds, memory_bytes)

    def _allocate(self, largest_budget: int) -> SharedBuffers:
        return SharedBuffers.allocate(self._config, largest_budget, self._max_images, self._device)

    def _capture_one(self, budget: int, shared: SharedBuffers) -> BudgetGraphMetadata:
        started, used = time.perf_counter(), _reserved_memory(self._device)
        graph = self._capture(budget, shared)
        seconds, memory = time.perf_counter() - started, _reserved_memory(self._device) - used
        logger.info("captured %d tokens in %.2f s, %.0f MiB", budget, seconds, memory / 2**20)
        return graph

    def _capture(self, budget: int, shared: SharedBuffers) -> BudgetGraphMetadata:
        slots = num_slots(budget, self._max_images, self._smallest_image)
        live = shared.live.head(budget * self._config.input_rows_per_token, slots)
        output = shared.output.narrow(self._config.output_token_axis, 0, budget)
        batch = self._model.prepare_encoder_cudagraph_capture_inputs(budget, slots)
        load_batch(self._model, batch, live, shared.staging)

        def forward() -> None:
            self._model.encoder_cudagraph_forward(live.input, live.metadata, output)

        forward()  # compiles kernels and chooses algorithms, which is not allowed during capture
        graph = self._record(forward, shared) if self._device.type == "cuda" else EagerGraph(forward)
        return BudgetGraphMetadata(budget, slots, graph, live.input, live.metadata, output)

    def _record(self, forward: Callable[[], None], shared: SharedBuffers) -> Graph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        empty_cache(self._device)  # the allocator would not give the warm-up's memory to the capture
        # Other threads may allocate or pin memory meanwhile. Only the calls of this thread are captured.
        graph.capture_begin(pool=shared.pool, capture_error_mode="thread_local")
        try:
            forward()
        finally:
            graph.capture_end()
        return graph

    def _test(self, graph: BudgetGraphMetadata, staging: Staging) -> None:
        """Compares a graph with an eager run on random input: full, and with slots and rows left over.

        The second run has one image of half the budget. With a longer image, attention would take most of the
        time of the start.
        """
        budget = graph.token_budget
        live = Buffers(graph.input_buffer, graph.metadata_buffers)
        for tokens, images in ((budget, graph.max_batch_size), (max(self._smallest_image, budget // 2), 1)):
            batch = self._model.prepare_encoder_cudagraph_capture_inputs(tokens, images)
            expected = self._model.encoder_eager_forward(batch).float()
            load_batch(self._model, batch, live, staging)
            error = _relative_error(replay(graph, tokens, self._config.output_token_axis).float(), expected)
            if not error <= self._config.max_relative_error:  # NaN is an error too
                raise ModelError(
                    f"the graph of {budget} tokens differs from an eager run by {error:.3g}, "
                    f"and {self._config.max_relative_error:.3g} is allowed; turn cudagraph_mm_encoder off"
                )

    def too_large(self, budget: int) -> ModelError:
        """Returns the error for a budget that does not fit. Captures smaller ones to name a fit."""
        smaller = [tokens for tokens in infer_budgets(self._smallest_image, budget, 1) if tokens < budget]
        fitting = next(filter(self._fits, reversed(smaller)), None)
        advice = "not even the smallest fits" if fitting is None else f"budgets up to {fitting} tokens fit"
        return ModelError(
            f"no memory for a graph of {budget} tokens; {advice}: set encoder_cudagraph_token_budgets, lower "
            "max_pixels, or turn cudagraph_mm_encoder off"
        )

    def _fits(self, budget: int) -> bool:
        empty_cache(self._device)
        try:
            self._capture(budget, self._allocate(budget))
        except torch.OutOfMemoryError:
            return False
        return True


@contextmanager
def _memory_for(token_budget: int) -> Iterator[None]:
    """Raises `_OutOfMemory` with the budget if the device runs out of memory inside the context."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _OutOfMemory(token_budget) from error


def empty_cache(device: torch.device) -> None:
    """Returns memory that torch holds and does not use to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _reserved_memory(device: torch.device) -> int:
    """Bytes of the device that this process's allocator holds."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value - expected).norm() / expected.norm())

"""CUDA graphs of a vision encoder's whole forward pass at run time: greedy packing, replay, fall back.

The design is that of vLLM's encoder CUDA graphs (pull request 35963), with finer budgets. All that is
particular to a model is behind `SupportsEncoderCudaGraph`. Knows nothing of patches, pooling or requests.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic

import torch

from models.budgets import (
    BudgetError,
    check_budgets,
    check_max_images,
    infer_budgets,
    infer_max_images,
    num_slots,
)
from models.cudagraph_budget import BudgetGraphMetadata, load_batch, replay
from models.cudagraph_capture import capture_graphs, empty_cache
from models.cudagraph_protocol import BatchT, SupportsEncoderCudaGraph
from models.errors import ModelError
from models.packing import plan
from models.staging import Buffers, DirectStaging, Staging
from models.warm_up import compile_kernels

logger = logging.getLogger(__name__)

_IMAGES_BETWEEN_LOGS = 100_000


@dataclass(frozen=True)
class CudaGraphSettings:
    """How budgets are chosen, and what happens if the attention backend allows no graph."""

    token_budgets: tuple[int, ...] = ()  # empty: inferred from the model's range
    budget_steps: int = 8  # inferred budgets per octave; 1 gives powers of two
    max_images_per_batch: int = 0  # 0: inferred
    required: bool = True  # False: run eagerly with a backend that no graph can hold


@dataclass
class EncoderCounts:
    """Counts of images by how they ran, of replays, and of padding."""

    hits: int = 0  # images run by replay
    misses: Counter[str] = field(default_factory=Counter)  # images by reason: oversize, disabled, error
    replays: Counter[int] = field(default_factory=Counter)  # by token budget
    padding_tokens: int = 0  # computed and not used

    def add(self, other: EncoderCounts) -> None:
        self.hits += other.hits
        self.misses += other.misses
        self.replays += other.replays
        self.padding_tokens += other.padding_tokens

    @property
    def num_images(self) -> int:
        return self.hits + self.misses.total()


# Called with the indices of a sub-batch's images and their tokens, which the next replay overwrites.
Consume = Callable[[Sequence[int], torch.Tensor], None]


class EncoderCudaGraphManager(Generic[BatchT]):
    """Graphs of one model on one device. Used by one thread, on one stream.

    Without settings no graph is captured, and every image runs eagerly and is counted as a miss, `disabled`.
    """

    def __init__(
        self,
        model: SupportsEncoderCudaGraph[BatchT],
        settings: CudaGraphSettings | None,
        device: torch.device,
    ) -> None:
        self.model = model
        self.device = device
        self.counts = EncoderCounts()
        self.graphs: dict[int, BudgetGraphMetadata] = {}
        self.capture_seconds = 0.0
        self.memory_bytes = 0
        self._token_axis = model.get_encoder_cudagraph_config().output_token_axis
        self._staging: Staging = DirectStaging()
        smallest, largest = model.get_encoder_cudagraph_budget_range()
        if settings is None:
            self.budgets: tuple[int, ...] = (largest,)
            self.max_images = largest // smallest
            compile_kernels(model, device, above_tokens=0)
        else:
            self.budgets, self.max_images = _resolve(settings, smallest, largest)
            self._capture()
        self._slots = {budget: num_slots(budget, self.max_images, smallest) for budget in self.budgets}

    def _capture(self) -> None:
        captured = capture_graphs(self.model, self.budgets, self.max_images, self.device)
        self.graphs = captured.graphs
        self.capture_seconds = captured.seconds
        self.memory_bytes = captured.memory_bytes
        self._staging = captured.staging
        compile_kernels(self.model, self.device, above_tokens=self.budgets[-1])
        empty_cache(self.device)

    def run(self, batch: BatchT, consume: Consume, begin: Callable[[], None] = lambda: None) -> EncoderCounts:
        """Encodes a batch in sub-batches and passes the tokens of each to `consume`.

        `begin` is called before the work of each sub-batch is launched, and after its input is copied. A
        sub-batch that cannot be loaded runs eagerly. Raises errors of the device.
        """
        num_tokens = self.model.get_encoder_cudagraph_per_item_output_tokens(batch)
        packed = plan(num_tokens, self._slots)
        counts = EncoderCounts()
        for budget, indices in packed.replays:
            part = self._part(batch, indices, len(num_tokens))
            graph = self.graphs.get(budget)
            loaded = graph is not None and self._load(part, graph)
            begin()
            if graph is None:
                self._run_eagerly(part, indices, consume, counts, "disabled")
            elif not loaded:
                self._run_eagerly(part, indices, consume, counts, "error")
            else:
                used = sum(num_tokens[index] for index in indices)
                consume(indices, replay(graph, used, self._token_axis))
                counts.hits += len(indices)
                counts.replays[budget] += 1
                counts.padding_tokens += budget - used
        for index in packed.oversize:
            part = self._part(batch, (index,), len(num_tokens))
            begin()
            self._run_eagerly(part, (index,), consume, counts, "oversize" if self.graphs else "disabled")
        self._staging.wait()
        self._count(counts)
        return counts

    def execute(self, batch: BatchT) -> list[torch.Tensor]:
        """Returns the tokens of each image, in the batch's order. Tokens stay on the model's token axis."""
        num_tokens = self.model.get_encoder_cudagraph_per_item_output_tokens(batch)
        results: dict[int, torch.Tensor] = {}

        def keep(indices: Sequence[int], tokens: torch.Tensor) -> None:
            lengths = [num_tokens[index] for index in indices]
            results.update(zip(indices, tokens.clone().split(lengths, dim=self._token_axis), strict=True))

        self.run(batch, keep)
        return [results[index] for index in range(len(num_tokens))]

    def _part(self, batch: BatchT, indices: Sequence[int], num_items: int) -> BatchT:
        if len(indices) == num_items and list(indices) == sorted(indices):
            return batch
        return self.model.select_encoder_cudagraph_items(batch, indices)

    def _load(self, batch: BatchT, graph: BudgetGraphMetadata) -> bool:
        """Brings a batch into the graph's buffers. Returns False if it has to run eagerly instead.

        An error of the device itself is raised. Memory that a failed attempt allocated is free on return.
        """
        live = Buffers(graph.input_buffer, graph.metadata_buffers)
        try:
            load_batch(self.model, batch, live, self._staging)
        except torch.AcceleratorError:
            raise
        except (RuntimeError, MemoryError, ValueError) as error:
            # torch raises RuntimeError (no memory on the device or the host, shapes that do not fit), numpy
            # raises MemoryError and ValueError. The log gets the text only: a kept record would keep the
            # error's frames.
            num_images = self.model.get_encoder_cudagraph_num_items(batch)
            logger.warning("a batch of %d images runs eagerly: %s", num_images, str(error))
            return False
        return True

    def _run_eagerly(
        self, batch: BatchT, indices: Sequence[int], consume: Consume, counts: EncoderCounts, reason: str
    ) -> None:
        consume(indices, self.model.encoder_eager_forward(batch))
        counts.misses[reason] += len(indices)

    def _count(self, counts: EncoderCounts) -> None:
        before = self.counts.num_images // _IMAGES_BETWEEN_LOGS
        self.counts.add(counts)
        if self.counts.num_images // _IMAGES_BETWEEN_LOGS > before:
            logger.info(
                "%d images by replay, eagerly %s, %d tokens of padding",
                self.counts.hits,
                dict(self.counts.misses),
                self.counts.padding_tokens,
            )


def _resolve(settings: CudaGraphSettings, smallest: int, largest: int) -> tuple[tuple[int, ...], int]:
    """Returns the budgets and the limit on images."""
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

"""The captured graph of one token budget, the buffers that all budgets share, and the replay of a batch.

Knows nothing of how budgets are chosen, and nothing of the content of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from models.cudagraph_protocol import BatchT, EncoderCudaGraphConfig, ReplayBuffers, SupportsEncoderCudaGraph
from models.staging import Buffers, CudaStaging, DirectStaging, Staging


class Graph(Protocol):
    """A captured forward pass."""

    def replay(self) -> None: ...


class EagerGraph:
    """Replaces a CUDA graph on other devices: a replay calls the forward pass on the same buffers."""

    def __init__(self, forward: Callable[[], None]) -> None:
        self._forward = forward

    def replay(self) -> None:
        self._forward()


@dataclass(frozen=True, eq=False)
class BudgetGraphMetadata:
    """One captured budget. Its buffers are views of those that all budgets share."""

    token_budget: int
    max_batch_size: int
    graph: Graph
    input_buffer: torch.Tensor
    metadata_buffers: Mapping[str, torch.Tensor]
    output_buffer: torch.Tensor


@dataclass(frozen=True, eq=False)
class SharedBuffers:
    """The buffers and the memory pool that all budgets share, in the size that the largest budget needs."""

    live: Buffers
    output: torch.Tensor
    staging: Staging
    pool: Any  # a handle of torch's, whose type is private

    @classmethod
    def allocate(
        cls, config: EncoderCudaGraphConfig, largest_budget: int, max_images: int, device: torch.device
    ) -> SharedBuffers:
        """Allocates zeroed buffers."""
        rows = largest_budget * config.input_rows_per_token
        shape = list(config.output_shape)
        shape.insert(config.output_token_axis, largest_budget)
        on_cuda = device.type == "cuda"
        return cls(
            live=Buffers.allocate(config, rows, max_images, device),
            output=torch.zeros(shape, dtype=config.output_dtype, device=device),
            staging=CudaStaging(config, rows, max_images, device) if on_cuda else DirectStaging(),
            pool=torch.cuda.graph_pool_handle() if on_cuda else None,
        )


def load_batch(
    model: SupportsEncoderCudaGraph[BatchT], batch: BatchT, live: Buffers, staging: Staging
) -> None:
    """Brings a batch into the live buffers of a graph, on the current stream."""

    def fill(buffers: ReplayBuffers) -> None:
        model.prepare_encoder_cudagraph_replay_buffers(batch, buffers)

    staging.load(live, sum(model.get_encoder_cudagraph_per_item_input_sizes(batch)), fill)


def replay(graph: BudgetGraphMetadata, num_tokens: int, token_axis: int) -> torch.Tensor:
    """Runs a graph on the batch in its live buffers. Returns a view of the first `num_tokens` tokens."""
    graph.graph.replay()
    return graph.output_buffer.narrow(token_axis, 0, num_tokens)

"""What a vision encoder offers so that CUDA graphs of its whole forward pass can be captured and replayed.

The methods are those of vLLM's encoder CUDA graph design (pull request 35963), with a batch type of the model
in place of a dictionary. A new encoder joins by implementing them; the manager knows nothing else of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch

BatchT = TypeVar("BatchT")


@dataclass(frozen=True)
class MetadataSpec:
    """One array that says something of each image: its dtype, and its shape behind the axis of images."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class EncoderCudaGraphConfig:
    """The buffers that a graph of the encoder reads and writes."""

    input_rows_per_token: int  # rows of the input for each output token
    input_shape: tuple[int, ...]  # of one row
    input_dtype: torch.dtype
    metadata: Mapping[str, MetadataSpec]  # unused slots are zeros
    output_shape: tuple[int, ...]  # of one token; `output_token_axis` says where the tokens go in it
    output_token_axis: int
    output_dtype: torch.dtype
    max_relative_error: float  # that a graph may differ from an eager run of the same batch


@dataclass(frozen=True, eq=False)
class ReplayBuffers:
    """Memory that one sub-batch is written into: exact rows of input, all slots of metadata."""

    input: torch.Tensor  # [rows, *input_shape] on the encoder's device, where it holds anything at first
    metadata: Mapping[str, torch.Tensor]  # each [images, *shape] in host memory, zeros at first


@runtime_checkable
class SupportsEncoderCudaGraph(Protocol[BatchT]):
    """A vision encoder whose forward pass can be captured. Items are images; tokens are output rows."""

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """The buffers of a graph."""
        ...

    def get_encoder_cudagraph_budget_range(self) -> tuple[int, int]:
        """Tokens of the model's smallest image, and of the largest worth capturing."""
        ...

    def get_encoder_cudagraph_num_items(self, batch: BatchT) -> int: ...

    def get_encoder_cudagraph_per_item_output_tokens(self, batch: BatchT) -> list[int]: ...

    def get_encoder_cudagraph_per_item_input_sizes(self, batch: BatchT) -> list[int]:
        """Input rows of each item, which balance the load over several devices."""
        ...

    def select_encoder_cudagraph_items(self, batch: BatchT, indices: Sequence[int]) -> BatchT: ...

    def prepare_encoder_cudagraph_capture_inputs(self, token_budget: int, max_batch_size: int) -> BatchT:
        """A batch of random content that fills the budget as far as the model's sizes allow."""
        ...

    def prepare_encoder_cudagraph_replay_buffers(self, batch: BatchT, buffers: ReplayBuffers) -> None:
        """Writes the batch into the buffers, items in order; input by copies on the current stream."""
        ...

    def encoder_cudagraph_forward(
        self, inputs: torch.Tensor, metadata: Mapping[str, torch.Tensor], output: torch.Tensor
    ) -> None:
        """The whole forward pass, from device buffers into the output buffer: no host work that depends on
        their content. Rows behind those of the images hold anything and must not reach an image's tokens."""
        ...

    def encoder_eager_forward(self, batch: BatchT) -> torch.Tensor:
        """Tokens of the batch, in order, at its exact size: shaped like an output buffer."""
        ...

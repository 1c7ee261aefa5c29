"""The protocol that a vision encoder implements so that CUDA graphs of its forward pass can be captured.

The methods are those of vLLM's encoder CUDA graph design (pull request 35963), with a batch type of the model
in place of a dictionary. To add an encoder, implement them: the manager uses nothing else of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch

BatchT = TypeVar("BatchT")


@dataclass(frozen=True)
class MetadataSpec:
    """One array with a value for each image: its dtype, and its shape without the axis of images."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class EncoderCudaGraphConfig:
    """The buffers that a graph of the encoder reads and writes."""

    input_rows_per_token: int  # rows of the input for each output token
    input_shape: tuple[int, ...]  # of one row
    input_dtype: torch.dtype
    metadata: Mapping[str, MetadataSpec]  # unused slots are zeros
    output_shape: tuple[int, ...]  # of one token, to which `output_token_axis` is added
    output_token_axis: int
    output_dtype: torch.dtype
    max_relative_error: float  # by which a graph may differ from an eager run of the same batch


@dataclass(frozen=True, eq=False)
class ReplayBuffers:
    """Memory for one sub-batch: as many rows of input as the sub-batch has, and all slots of metadata."""

    input: torch.Tensor  # [rows, *input_shape] on the encoder's device, not initialized
    metadata: Mapping[str, torch.Tensor]  # each [images, *shape] in host memory, zeros


@runtime_checkable
class SupportsEncoderCudaGraph(Protocol[BatchT]):
    """A vision encoder whose forward pass can be captured. Items are images, tokens are output rows."""

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """Returns the shapes and dtypes of a graph's buffers."""
        ...

    def get_encoder_cudagraph_budget_range(self) -> tuple[int, int]:
        """Returns the tokens of the model's smallest image, and of the largest image worth capturing."""
        ...

    def get_encoder_cudagraph_num_items(self, batch: BatchT) -> int: ...

    def get_encoder_cudagraph_per_item_output_tokens(self, batch: BatchT) -> list[int]: ...

    def get_encoder_cudagraph_per_item_input_sizes(self, batch: BatchT) -> list[int]:
        """Returns the input rows of each item."""
        ...

    def select_encoder_cudagraph_items(self, batch: BatchT, indices: Sequence[int]) -> BatchT: ...

    def prepare_encoder_cudagraph_capture_inputs(self, token_budget: int, max_batch_size: int) -> BatchT:
        """Returns a batch of random content that fills the budget as far as the model's image sizes allow."""
        ...

    def prepare_encoder_cudagraph_replay_buffers(self, batch: BatchT, buffers: ReplayBuffers) -> None:
        """Writes the batch into the buffers, items in order. Input is copied on the current stream."""
        ...

    def encoder_cudagraph_forward(
        self, inputs: torch.Tensor, metadata: Mapping[str, torch.Tensor], output: torch.Tensor
    ) -> None:
        """Runs the whole forward pass, from device buffers into the output buffer.

        Host work must not depend on the content of buffers. Rows after those of the images hold any values,
        which must not reach an image's tokens.
        """
        ...

    def encoder_eager_forward(self, batch: BatchT) -> torch.Tensor:
        """Returns the tokens of the batch, in order, in the shape of an output buffer without padding."""
        ...

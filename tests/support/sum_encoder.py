"""A minimal encoder for the graph manager, whose answers are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from models import (
    CudaGraphSettings,
    EncoderCudaGraphManager,
)
from models.cudagraph_protocol import EncoderCudaGraphConfig, MetadataSpec, ReplayBuffers

CPU = torch.device("cpu")


class SumEncoder:
    """A tiny encoder that implements the protocol and nothing else.

    An image is a vector of numbers, two for each token. A token is the running sum of its image's pairs,
    times the image's factor. So a token depends on its neighbours and on the image's metadata.
    """

    def __init__(self, wrong_from: int = 10**9) -> None:
        self.fault: Callable[[], object] | None = None  # called while a batch is written, halfway; it raises
        self.wrong_from = wrong_from  # graphs of at least this many tokens compute something else
        self.forwards: list[int] = []  # tokens of each forward pass

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(
            input_rows_per_token=2,
            input_shape=(),
            input_dtype=torch.float32,
            metadata={"length": MetadataSpec((), torch.int64), "factor": MetadataSpec((1,), torch.float32)},
            output_shape=(1,),
            output_token_axis=0,
            output_dtype=torch.float32,
            max_relative_error=1e-5,
        )

    def get_encoder_cudagraph_budget_range(self) -> tuple[int, int]:
        return 2, 20

    def get_encoder_cudagraph_num_items(self, batch: list[list[float]]) -> int:
        return len(batch)

    def get_encoder_cudagraph_per_item_output_tokens(self, batch: list[list[float]]) -> list[int]:
        return [len(image) // 2 for image in batch]

    def get_encoder_cudagraph_per_item_input_sizes(self, batch: list[list[float]]) -> list[int]:
        return [len(image) for image in batch]

    def select_encoder_cudagraph_items(
        self, batch: list[list[float]], indices: Sequence[int]
    ) -> list[list[float]]:
        return [batch[index] for index in indices]

    def prepare_encoder_cudagraph_capture_inputs(
        self, token_budget: int, max_batch_size: int
    ) -> list[list[float]]:
        rng = np.random.default_rng(token_budget)
        rest = token_budget // max_batch_size
        lengths = [token_budget - rest * (max_batch_size - 1), *[rest] * (max_batch_size - 1)]
        return [rng.normal(size=2 * tokens).tolist() for tokens in lengths]

    def prepare_encoder_cudagraph_replay_buffers(
        self, batch: list[list[float]], buffers: ReplayBuffers
    ) -> None:
        if self.fault is not None:
            buffers.input[:] = torch.nan
            for array in buffers.metadata.values():
                array.fill_(3)
            self.fault()
        buffers.input[:] = torch.tensor([x for image in batch for x in image])
        for slot, image in enumerate(batch):
            buffers.metadata["length"][slot] = len(image) // 2
            buffers.metadata["factor"][slot] = factor(image)

    def encoder_cudagraph_forward(
        self, inputs: torch.Tensor, metadata: Mapping[str, torch.Tensor], output: torch.Tensor
    ) -> None:
        self.forwards.append(len(output))
        at = 0
        for length, times in zip(metadata["length"].tolist(), metadata["factor"].flatten(), strict=True):
            pairs = inputs[2 * at : 2 * (at + length)].view(-1, 2).sum(1)
            output[at : at + length, 0] = pairs.cumsum(0) * times
            at += length
        if len(output) >= self.wrong_from:
            output += 1

    def encoder_eager_forward(self, batch: list[list[float]]) -> torch.Tensor:
        return torch.cat([expected(image) for image in batch])


def factor(image: list[float]) -> float:
    return 1 + abs(image[0])


def expected(image: list[float]) -> torch.Tensor:
    return (torch.tensor(image).view(-1, 2).sum(1).cumsum(0) * factor(image))[:, None]


def images(*num_tokens: int, seed: int = 0) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=2 * tokens).tolist() for tokens in num_tokens]


def manager(model: SumEncoder | None = None, **settings: Any) -> EncoderCudaGraphManager[list[list[float]]]:
    return EncoderCudaGraphManager(model or SumEncoder(), CudaGraphSettings(**settings), CPU)

"""Adapts Qwen3-VL's vision transformer to `SupportsEncoderCudaGraph`.

Says which buffers the forward pass reads, how a batch of `Patches` is written into them, and how a batch runs
eagerly, at its exact size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from models.cudagraph_protocol import EncoderCudaGraphConfig, MetadataSpec, ReplayBuffers
from models.preprocess import Patches, PreprocessConfig
from models.qwen3_vl import VisionTransformer
from models.staging import Uploader


class Qwen3VLAdapter:
    """A batch is a sequence of `Patches`. Output buffers are [1 + deepstack levels, tokens, out_hidden]."""

    def __init__(self, model: VisionTransformer, preprocess: PreprocessConfig) -> None:
        weight = model.pos_embed.weight
        self.model = model
        self.device = weight.device
        self.dtype = weight.dtype
        self._preprocess = preprocess
        self._merge = preprocess.merge_size**2
        self._uploader = Uploader(self.get_encoder_cudagraph_config(), self.device)

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        config = self.model.config
        return EncoderCudaGraphConfig(
            input_rows_per_token=self._merge,
            input_shape=(config.patch_dim,),
            input_dtype=torch.uint8,
            metadata={"grids": MetadataSpec((2,), torch.int32)},
            output_shape=(1 + len(config.deepstack_visual_indexes), config.out_hidden_size),
            output_token_axis=1,
            output_dtype=self.dtype,
            max_relative_error=1e-4 if self.dtype == torch.float32 else 5e-2,
        )

    def get_encoder_cudagraph_budget_range(self) -> tuple[int, int]:
        token_pixels = self._preprocess.factor**2
        smallest = -(-self._preprocess.min_pixels // token_pixels)
        return smallest, max(smallest, self._preprocess.max_pixels // token_pixels)

    def get_encoder_cudagraph_num_items(self, batch: Sequence[Patches]) -> int:
        return len(batch)

    def get_encoder_cudagraph_per_item_output_tokens(self, batch: Sequence[Patches]) -> list[int]:
        return [image.num_tokens for image in batch]

    def get_encoder_cudagraph_per_item_input_sizes(self, batch: Sequence[Patches]) -> list[int]:
        return [image.num_tokens * self._merge for image in batch]

    def select_encoder_cudagraph_items(
        self, batch: Sequence[Patches], indices: Sequence[int]
    ) -> Sequence[Patches]:
        return [batch[index] for index in indices]

    def prepare_encoder_cudagraph_capture_inputs(
        self, token_budget: int, max_batch_size: int
    ) -> Sequence[Patches]:
        """Returns `max_batch_size` images of random pixels, each as close to a square as its tokens allow."""
        rest = token_budget // max_batch_size
        lengths = [token_budget - rest * (max_batch_size - 1), *[rest] * (max_batch_size - 1)]
        rng = np.random.default_rng(token_budget)
        return [self._random_image(tokens, rng) for tokens in lengths]

    def _random_image(self, tokens: int, rng: np.random.Generator) -> Patches:
        side = self._preprocess.merge_size
        height = next(x for x in range(math.isqrt(tokens), 0, -1) if tokens % x == 0)
        shape = (tokens * self._merge, self.model.config.patch_dim)
        words = rng.integers(0, 2**64, -(-math.prod(shape) // 8), dtype=np.uint64)  # faster than bytes
        pixels = torch.from_numpy(words.view(np.uint8)[: math.prod(shape)].reshape(shape))
        return Patches(pixels, (1, side * height, side * (tokens // height)), tokens)

    def prepare_encoder_cudagraph_replay_buffers(
        self, batch: Sequence[Patches], buffers: ReplayBuffers
    ) -> None:
        # One call for all images: each call releases the interpreter lock and has to acquire it again.
        rows = buffers.input.split(self.get_encoder_cudagraph_per_item_input_sizes(batch))
        torch._foreach_copy_(rows, [image.pixels for image in batch], non_blocking=True)
        grids = np.array([image.grid_thw[1:] for image in batch], dtype=np.int32)
        buffers.metadata["grids"].numpy()[: len(batch)] = grids

    def encoder_cudagraph_forward(
        self, inputs: torch.Tensor, metadata: Mapping[str, torch.Tensor], output: torch.Tensor
    ) -> None:
        self.model(inputs, metadata["grids"], output, max_length=len(inputs), padded=True)

    def encoder_eager_forward(self, batch: Sequence[Patches]) -> torch.Tensor:
        fill = partial(self.prepare_encoder_cudagraph_replay_buffers, batch)
        lengths = self.get_encoder_cudagraph_per_item_input_sizes(batch)
        buffers = self._uploader.upload(sum(lengths), len(batch), fill)
        config = self.model.config
        levels = 1 + len(config.deepstack_visual_indexes)
        tokens = sum(lengths) // self._merge
        output = torch.empty(levels, tokens, config.out_hidden_size, dtype=self.dtype, device=self.device)
        self.model(
            buffers.input,
            buffers.metadata["grids"],
            output,
            max_length=max(lengths),
            padded=False,
        )
        self._uploader.wait()
        return output

"""The vision transformer of Qwen3-VL and Qwen3.5, read from top to bottom.

Images are packed: their patches follow one another in one matrix, and attention keeps the images apart.
Parameters are named as in the checkpoint. The reference is `Qwen3VLVisionModel` in transformers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from models.attention import Attention, Sequences, reference_attention
from models.config import VisionConfig
from models.kernels import PIXEL_CENTER, Kernels, PlainKernels, Positions
from models.positions import rotary_inverse_frequencies

NORM_EPS = 1e-6


class PatchEmbed(nn.Module):
    """uint8 patches [n, patch_dim] → [n, hidden], with the weights that `fold_patch_embedding` returns."""

    def __init__(self, config: VisionConfig, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.proj = nn.Linear(config.patch_dim, config.hidden_size)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.proj(self.kernels.center_pixels(pixels, self.proj.weight.dtype))
        return out


class SelfAttention(nn.Module):
    """Attention within each image, with rotary positions. The block applies the projection."""

    def __init__(self, config: VisionConfig, attention: Attention, kernels: Kernels) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attention = attention
        self.kernels = kernels
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: torch.Tensor, positions: Positions, max_length: int) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # [n, 3, heads, head_dim]
        self.kernels.rotate_(qkv, positions)
        q, k, v = qkv.unbind(1)
        out = self.attention(q, k, v, Sequences(positions.cu_seqlens, max_length))
        return out.flatten(1)  # [n, hidden]


class Mlp(nn.Module):
    """The two layers. The block applies them."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)


class Block(nn.Module):
    """One transformer block, in place: x += attention(norm(x)), then x += MLP(norm(x))."""

    def __init__(self, config: VisionConfig, attention: Attention, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.attn = SelfAttention(config, attention, kernels)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.mlp = Mlp(config)
        self.pending1 = _no_biases(config.hidden_size)  # biases that x lacks at norm1
        self.pending2 = _no_biases(config.hidden_size)  # and at norm2

    def forward(
        self, x: torch.Tensor, positions: Positions, max_length: int, num_rows: torch.Tensor | None
    ) -> None:
        kernels = self.kernels
        # Rows after the images must be finite here: attention reads them, and zero times NaN is NaN.
        attended = self.attn(kernels.norm(x, self.pending1, self.norm1, num_rows), positions, max_length)
        kernels.add_linear_(x, attended, self.attn.proj)
        inner = kernels.linear_gelu(kernels.norm(x, self.pending2, self.norm2), self.mlp.linear_fc1)
        kernels.add_linear_(x, inner, self.mlp.linear_fc2)


class PatchMerger(nn.Module):
    """Joins the patches of each merge block into one token: [n, hidden] → out [n / merge², out_hidden].

    The main merger normalizes patches, the deepstack mergers normalize joined blocks.
    """

    def __init__(self, config: VisionConfig, kernels: Kernels, *, norm_after_merge: bool) -> None:
        super().__init__()
        self.kernels = kernels
        self.merged_size = config.hidden_size * config.spatial_merge_size**2
        self.norm_size = self.merged_size if norm_after_merge else config.hidden_size
        self.norm = nn.LayerNorm(self.norm_size, eps=NORM_EPS)
        self.linear_fc1 = nn.Linear(self.merged_size, self.merged_size)
        self.linear_fc2 = nn.Linear(self.merged_size, config.out_hidden_size)
        self.pending = _no_biases(self.norm_size)  # biases that x lacks

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        normed = self.kernels.norm(x.view(-1, self.norm_size), self.pending, self.norm)
        inner = F.gelu(self.linear_fc1(normed.view(-1, self.merged_size)))
        torch.addmm(self.linear_fc2.bias, inner, self.linear_fc2.weight.t(), out=out)


def _pending(biases: torch.Tensor) -> nn.Buffer:
    return nn.Buffer(biases, persistent=False)


def _no_biases(size: int) -> nn.Buffer:
    return _pending(torch.zeros(size, dtype=torch.float32, device="cpu"))


class VisionTransformer(nn.Module):
    """Turns patches of packed images into tokens of the main and the deepstack levels."""

    def __init__(self, config: VisionConfig, attention: Attention, kernels: Kernels) -> None:
        super().__init__()
        self.config = config
        self.kernels = kernels
        self.patch_embed = PatchEmbed(config, kernels)
        # Zeros instead of nn.Embedding's random values, for which torch imports its compiler in a second.
        self.pos_embed = nn.Embedding.from_pretrained(
            torch.zeros(config.num_position_embeddings, config.hidden_size)
        )
        self.blocks = nn.ModuleList([Block(config, attention, kernels) for _ in range(config.depth)])
        self.merger = PatchMerger(config, kernels, norm_after_merge=False)
        self.deepstack_merger_list = nn.ModuleList(
            [PatchMerger(config, kernels, norm_after_merge=True) for _ in config.deepstack_visual_indexes]
        )
        frequencies = rotary_inverse_frequencies(config.head_dim, config.rope_theta)
        self.inverse_frequencies = nn.Buffer(frequencies, persistent=False)  # float32 [head_dim / 4]

    def forward(
        self, pixels: torch.Tensor, grids: torch.Tensor, out: torch.Tensor, *, max_length: int, padded: bool
    ) -> None:
        """Writes the tokens of packed images into `out` [1 + deepstack levels, n / merge², out_hidden].

        `pixels` is uint8 [n, patch_dim]; `grids` int32 [images, 2], unused slots 0 × 0; no image has more
        than `max_length` patches. If `padded`, there may be rows after those of the images.
        """
        x = self.patch_embed(pixels)  # [n, hidden]
        positions = self.kernels.add_positions_(
            x, self.pos_embed.weight, grids, self.inverse_frequencies, self.config.spatial_merge_size
        )
        num_rows = positions.num_rows if padded else None
        levels = {index: level for level, index in enumerate(self.config.deepstack_visual_indexes)}
        for index, block in enumerate(self.blocks):
            block(x, positions, max_length, num_rows)
            if index in levels:
                self.deepstack_merger_list[levels[index]](x, out[1 + levels[index]])
        self.merger(x, out[0])

    def defer_biases(self) -> None:
        """Gives each norm the sum of the biases that x lacks there. For kernels that omit biases."""
        pending = torch.zeros(self.config.hidden_size, device=self.pos_embed.weight.device)
        after: dict[int, torch.Tensor] = {}
        for index, block in enumerate(cast(Iterable[Block], self.blocks)):
            block.pending1 = _pending(pending)
            pending = pending + block.attn.proj.bias.float()
            block.pending2 = _pending(pending)
            after[index] = pending = pending + block.mlp.linear_fc2.bias.float()
        self.merger.pending = _pending(pending)
        for index, merger in zip(
            self.config.deepstack_visual_indexes, self.deepstack_merger_list, strict=True
        ):
            merger.pending = _pending(after[index].repeat(self.config.spatial_merge_size**2))


PATCH_WEIGHT, PATCH_BIAS = "patch_embed.proj.weight", "patch_embed.proj.bias"


def checkpoint_shapes(config: VisionConfig) -> dict[str, tuple[int, ...]]:
    """Returns the tensor shapes in a checkpoint: those of the model, except for the patch embedding."""
    with torch.device("meta"):
        model = VisionTransformer(config, reference_attention, PlainKernels())
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
    return shapes | {PATCH_WEIGHT: (config.hidden_size, config.in_channels, *kernel)}


def fold_patch_embedding(
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    rescale_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewrites the checkpoint's patch embedding for centered pixels of a still image.

    The reference computes `weight · ((pixel · rescale - mean) / std) + bias` over repeated frames. The frames
    of a still image are equal, so the weights of the frames are added up. Scale and mean become part of
    weight and bias. Takes weight [hidden, channels, frames, patch, patch] and bias [hidden]. Returns float64
    [hidden, patch_dim] and [hidden], for pixels minus `PIXEL_CENTER`.
    """
    means, stds = (torch.tensor(x, dtype=torch.float64)[:, None, None] for x in (mean, std))
    still = weight.double().sum(dim=2)  # [hidden, channels, patch, patch]
    offset = (still * ((PIXEL_CENTER * rescale_factor - means) / stds)).sum(dim=(1, 2, 3))
    return (still * (rescale_factor / stds)).flatten(1), bias.double() + offset

"""The vision transformer of Qwen3-VL and Qwen3.5, read from top to bottom.

Images are packed: their patches stand one behind the other in one matrix, and attention keeps them apart.
Parameters are named as in the checkpoint. The reference is `Qwen3VLVisionModel` in transformers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from models.attention import Attention, Sequences, reference_attention
from models.config import VisionConfig
from models.positions import (
    interpolated_position_embedding,
    patch_coordinates,
    rotary_embedding,
    rotary_inverse_frequencies,
)

NORM_EPS = 1e-6
PIXEL_CENTER = 127.5  # patches travel as uint8; value - center is exact in bfloat16


class PatchEmbed(nn.Module):
    """uint8 patches [n, patch_dim] → [n, hidden], by weights that `fold_patch_embedding` made."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.patch_dim, config.hidden_size)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.proj(pixels.to(self.proj.weight.dtype) - PIXEL_CENTER)
        return out


class SelfAttention(nn.Module):
    """Attention within each image, with rotary positions."""

    def __init__(self, config: VisionConfig, attention: Attention) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attention = attention
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sequences: Sequences
    ) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # [n, 3, heads, head_dim]
        q, k, v = qkv.unbind(1)
        out = self.attention(rotate(q, cos, sin), rotate(k, cos, sin), v, sequences)  # [n, heads, head_dim]
        projected: torch.Tensor = self.proj(out.flatten(1))
        return projected


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [n, heads, head_dim] by angles [n, head_dim / 2], computed in float32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]  # [n, 1, head_dim / 2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """One transformer block: attention, then MLP, each behind a norm and beside a residual."""

    def __init__(self, config: VisionConfig, attention: Attention) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.attn = SelfAttention(config, attention)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.mlp = Mlp(config)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sequences: Sequences
    ) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, sequences)
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class PatchMerger(nn.Module):
    """Joins the patches of each merge block into one token: [n, hidden] → [n / merge², out_hidden].

    The main merger normalizes patches, the deepstack mergers normalize joined blocks.
    """

    def __init__(self, config: VisionConfig, *, norm_after_merge: bool) -> None:
        super().__init__()
        self.merged_size = config.hidden_size * config.spatial_merge_size**2
        self.norm_after_merge = norm_after_merge
        self.norm = nn.LayerNorm(self.merged_size if norm_after_merge else config.hidden_size, eps=NORM_EPS)
        self.linear_fc1 = nn.Linear(self.merged_size, self.merged_size)
        self.linear_fc2 = nn.Linear(self.merged_size, config.out_hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm_after_merge:
            x = self.norm(x.view(-1, self.merged_size))
        else:
            x = self.norm(x).view(-1, self.merged_size)
        out: torch.Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x)))
        return out


class VisionTransformer(nn.Module):
    """Patches of packed images → tokens [n / merge², out_hidden · (1 + deepstack levels)]."""

    inverse_frequencies: torch.Tensor  # float32 [head_dim / 4]

    def __init__(self, config: VisionConfig, attention: Attention) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList([Block(config, attention) for _ in range(config.depth)])
        self.merger = PatchMerger(config, norm_after_merge=False)
        self.deepstack_merger_list = nn.ModuleList(
            [PatchMerger(config, norm_after_merge=True) for _ in config.deepstack_visual_indexes]
        )
        frequencies = rotary_inverse_frequencies(config.head_dim, config.rope_theta)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def forward(self, pixels: torch.Tensor, grids: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        """`pixels`: uint8 [n, patch_dim]; `grids`: int32 [images, 2]; `lengths`: patches of each image."""
        coordinates = patch_coordinates(grids, len(pixels), self.config.spatial_merge_size)
        cos, sin = rotary_embedding(coordinates, self.inverse_frequencies)
        sequences = Sequences(coordinates.cu_seqlens, lengths)

        x = self.patch_embed(pixels)  # [n, hidden]
        x = x + interpolated_position_embedding(self.pos_embed.weight, coordinates).to(x.dtype)

        levels = dict(zip(self.config.deepstack_visual_indexes, self.deepstack_merger_list, strict=True))
        columns = []
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin, sequences)
            if index in levels:
                columns.append(levels[index](x))
        return torch.cat([self.merger(x), *columns], dim=-1)


PATCH_WEIGHT, PATCH_BIAS = "patch_embed.proj.weight", "patch_embed.proj.bias"


def checkpoint_shapes(config: VisionConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that a checkpoint of that shape holds: the model's own, but for the patch embedding."""
    with torch.device("meta"):
        model = VisionTransformer(config, reference_attention)
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
    """The checkpoint's patch embedding, rewritten to take centered pixels of a still image.

    The reference computes `weight · ((pixel · rescale - mean) / std) + bias` over repeated frames. A still's
    frames are equal, so the weights of the frames are summed; scale and mean go into weight and bias. Takes
    weight [hidden, channels, frames, patch, patch] and bias [hidden]; returns float64 [hidden, patch_dim]
    and [hidden], for pixels from which `PIXEL_CENTER` was taken.
    """
    means, stds = (torch.tensor(x, dtype=torch.float64)[:, None, None] for x in (mean, std))
    still = weight.double().sum(dim=2)  # [hidden, channels, patch, patch]
    offset = (still * ((PIXEL_CENTER * rescale_factor - means) / stds)).sum(dim=(1, 2, 3))
    return (still * (rescale_factor / stds)).flatten(1), bias.double() + offset

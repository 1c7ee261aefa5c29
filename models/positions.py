"""Grids → where each patch stands, on the device, without Python work for each patch.

Everything here is arithmetic over a small integer tensor of grids, with shapes known from the host alone,
so a CUDA graph can capture it and replay it for other grids. Rows behind the last real patch get finite
values that mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Where each of n packed patches stands in its image."""

    row: torch.Tensor  # int64 [n]
    column: torch.Tensor  # int64 [n]
    height: torch.Tensor  # int64 [n], rows of its image's grid
    width: torch.Tensor  # int64 [n], columns of its image's grid
    cu_seqlens: torch.Tensor  # int32 [images + 1], first patch of each image, then their number


def patch_coordinates(grids: torch.Tensor, num_patches: int, merge_size: int) -> Coordinates:
    """Coordinates of `num_patches` patches in merge-block order.

    `grids` is an integer tensor [images, 2] of heights and widths in patches, multiples of `merge_size`; an
    unused slot is 0 × 0. The order is that of the reference: blocks row by row, inside a block row by row.
    """
    sizes = grids.long()
    ends = sizes.prod(dim=1).cumsum(0)  # [images]
    index = torch.arange(num_patches, device=grids.device)
    image = torch.searchsorted(ends, index, right=True).clamp(max=len(grids) - 1)
    starts = F.pad(ends, (1, 0))
    within = index - starts[image]
    height, width = sizes[image].clamp(min=merge_size).unbind(1)

    block, inside = within // merge_size**2, within % merge_size**2
    blocks_per_row = width // merge_size
    row = block // blocks_per_row * merge_size + inside // merge_size
    column = block % blocks_per_row * merge_size + inside % merge_size
    return Coordinates(row, column, height, width, starts.int())


def interpolated_position_embedding(table: torch.Tensor, coordinates: Coordinates) -> torch.Tensor:
    """The learned square table [side², hidden], stretched over each image's grid: float32 [n, hidden].

    Bilinear with aligned corners. Source: `Qwen3VLVisionModel` in transformers.
    """
    side = int(table.shape[0] ** 0.5)
    top, bottom, down = _axis_taps(coordinates.row, coordinates.height, side)
    left, right, across = _axis_taps(coordinates.column, coordinates.width, side)
    up, back = 1 - down, 1 - across
    result = table[top * side + left].float() * (up * back)[:, None]
    for tap, weight in (
        (top * side + right, up * across),
        (bottom * side + left, down * back),
        (bottom * side + right, down * across),
    ):
        result.addcmul_(table[tap].float(), weight[:, None])
    return result


def _axis_taps(
    index: torch.Tensor, size: torch.Tensor, side: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The two neighbours in the table along one axis, and the weight of the second."""
    place = index.float() * (side - 1) / (size - 1).clamp(min=1)
    lower = place.floor()
    first = lower.long().clamp(max=side - 1)
    return first, (first + 1).clamp(max=side - 1), place - lower


def rotary_embedding(
    coordinates: Coordinates, inverse_frequencies: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, float32 [n, head_dim / 2] each: first half of the columns by row, second by column.

    `inverse_frequencies` is float32 [head_dim / 4].
    """
    places = torch.stack([coordinates.row, coordinates.column], dim=1).float()  # [n, 2]
    angles = (places[:, :, None] * inverse_frequencies).flatten(1)
    return angles.cos(), angles.sin()


def rotary_inverse_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """Inverse frequencies of the rotary embedding of one axis, float32 [head_dim / 4], on the CPU."""
    half = head_dim // 2
    return 1.0 / (theta ** (torch.arange(0, half, 2, dtype=torch.float32, device="cpu") / half))

"""Computes the position of each patch from the grids, on the device.

Everything here is arithmetic over a small integer tensor of grids. The host knows all shapes without reading
it, so a CUDA graph can be replayed for other grids. Rows after the last real patch get finite values without
a meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, eq=False)
class Coordinates:
    """The position of each of n packed patches in its image."""

    row: torch.Tensor  # int64 [n]
    column: torch.Tensor  # int64 [n]
    height: torch.Tensor  # int64 [n], rows of its image's grid
    width: torch.Tensor  # int64 [n], columns of its image's grid
    cu_seqlens: torch.Tensor  # int32 [images + 1], first patch of each image, then their number


def patch_coordinates(grids: torch.Tensor, num_patches: int, merge_size: int) -> Coordinates:
    """Returns the coordinates of `num_patches` patches in merge-block order.

    `grids` is an integer tensor [images, 2] of heights and widths in patches, multiples of `merge_size`; an
    unused slot is 0 × 0. The order is that of the reference: blocks row by row, and in a block row by row.
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
    """Stretches the learned square table [side², hidden] over each image's grid. Returns float32 [n, hidden].

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
    """Returns both neighbours in the table along one axis, and the weight of the second."""
    place = index.float() * (side - 1) / (size - 1).clamp(min=1)
    lower = place.floor()
    first = lower.long().clamp(max=side - 1)
    return first, (first + 1).clamp(max=side - 1), place - lower


def rotary_embedding(
    coordinates: Coordinates, inverse_frequencies: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cosine and sine, float32 [n, head_dim / 2] each. The first half of the columns is by row.

    `inverse_frequencies` is float32 [head_dim / 4].
    """
    places = torch.stack([coordinates.row, coordinates.column], dim=1).float()  # [n, 2]
    angles = (places[:, :, None] * inverse_frequencies).flatten(1)
    return angles.cos(), angles.sin()


def rotary_inverse_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """Returns inverse frequencies of one axis's rotary embedding, float32 [head_dim / 4], on the CPU."""
    half = head_dim // 2
    return 1.0 / (theta ** (torch.arange(0, half, 2, dtype=torch.float32, device="cpu") / half))

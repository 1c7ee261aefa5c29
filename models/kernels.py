"""Steps of the forward pass that deserve a kernel of their own, each in two forms.

`PlainKernels` are a few lines of torch and run anywhere. `FusedKernels` are Triton kernels and cuBLAS
epilogues for CUDA in half precision. Both compute the same functions, and tests compare them. Knows nothing
of the order of the steps.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from models.positions import interpolated_position_embedding, patch_coordinates, rotary_embedding

_TRITON = importlib.util.find_spec("triton")
HAS_TRITON = _TRITON is not None and _TRITON.origin is not None  # a folder of that name has none
if HAS_TRITON:
    import triton

    from models import triton_kernels

PIXEL_CENTER = 127.5  # patches travel as uint8; value - center is exact in bfloat16


@dataclass(frozen=True, eq=False)
class Positions:
    """The positions of packed patches, for the blocks."""

    cu_seqlens: torch.Tensor  # int32 [images + 1]
    cos: torch.Tensor  # float32 [n, head_dim / 2]
    sin: torch.Tensor  # float32 [n, head_dim / 2]

    @property
    def num_rows(self) -> torch.Tensor:
        """int32 [1]: the number of rows that belong to an image. Later rows are padding."""
        return self.cu_seqlens[-1:]


class Kernels(Protocol):
    """A trailing underscore means that the first argument is changed in place."""

    defers_biases: bool  # `add_linear_` omits the bias, and `norm` adds the omitted biases

    def center_pixels(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns uint8 pixels, centered and in that dtype."""
        ...

    def add_positions_(
        self,
        x: torch.Tensor,
        table: torch.Tensor,
        grids: torch.Tensor,
        frequencies: torch.Tensor,
        merge_size: int,
    ) -> Positions:
        """Adds the interpolated position embedding to x [n, hidden]; returns the positions."""
        ...

    def norm(
        self, x: torch.Tensor, pending: torch.Tensor, norm: nn.LayerNorm, num_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns LayerNorm of x [n, columns] plus the pending biases. Rows from `num_rows` on are zeros."""
        ...

    def rotate_(self, qkv: torch.Tensor, positions: Positions) -> None:
        """Applies the rotary embedding to q and k in [n, 3, heads, head_dim]."""
        ...

    def linear_gelu(self, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        """Returns tanh GELU of the linear layer."""
        ...

    def add_linear_(self, x: torch.Tensor, y: torch.Tensor, linear: nn.Linear) -> None:
        """Adds the linear layer of y to x, without its bias if biases are deferred."""
        ...

    def mean_rows(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Returns each image's float32 mean of x [tokens, columns]. `ends` is int32 [images + 1], from 0."""
        ...


class PlainKernels:
    """A few lines of torch for each step."""

    defers_biases = False

    def center_pixels(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return pixels.to(dtype) - PIXEL_CENTER

    def add_positions_(
        self,
        x: torch.Tensor,
        table: torch.Tensor,
        grids: torch.Tensor,
        frequencies: torch.Tensor,
        merge_size: int,
    ) -> Positions:
        coordinates = patch_coordinates(grids, len(x), merge_size)
        x += interpolated_position_embedding(table, coordinates).to(x.dtype)
        return Positions(coordinates.cu_seqlens, *rotary_embedding(coordinates, frequencies))

    def norm(
        self, x: torch.Tensor, pending: torch.Tensor, norm: nn.LayerNorm, num_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        out: torch.Tensor = norm(x)
        if num_rows is not None:
            row = torch.arange(len(x), device=x.device)
            out.masked_fill_((row >= num_rows)[:, None], 0.0)
        return out

    def rotate_(self, qkv: torch.Tensor, positions: Positions) -> None:
        cos, sin = positions.cos[:, None, None], positions.sin[:, None, None]  # [n, 1, 1, head_dim / 2]
        first, second = qkv[:, :2].float().chunk(2, dim=-1)
        qkv[:, :2] = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(qkv.dtype)

    def linear_gelu(self, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        return F.gelu(linear(x), approximate="tanh")

    def add_linear_(self, x: torch.Tensor, y: torch.Tensor, linear: nn.Linear) -> None:
        x += linear(y)

    def mean_rows(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[a:b].mean(dim=0, dtype=torch.float32) for a, b in pairwise(ends.tolist())])


class FusedKernels:
    """Triton kernels, most with one program for each row, and cuBLAS epilogues."""

    defers_biases = True

    def center_pixels(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty_like(pixels, dtype=dtype)
        block = 4096
        triton_kernels.center_pixels[(triton.cdiv(pixels.numel(), block),)](
            pixels, out, pixels.numel(), PIXEL_CENTER, block
        )
        return out

    def add_positions_(
        self,
        x: torch.Tensor,
        table: torch.Tensor,
        grids: torch.Tensor,
        frequencies: torch.Tensor,
        merge_size: int,
    ) -> Positions:
        (n, hidden), num_images, quarter = x.shape, len(grids), len(frequencies)
        slots = max(64, triton.next_power_of_2(num_images))  # one kernel for all usual numbers of images
        cu_seqlens = torch.empty(num_images + 1, dtype=torch.int32, device=x.device)
        cos, sin = torch.empty(2, n, 2 * quarter, dtype=torch.float32, device=x.device)
        triton_kernels.offsets[(1,)](grids, cu_seqlens, num_images, slots)
        triton_kernels.add_positions[(n,)](
            x, table, grids, cu_seqlens, frequencies, cos, sin, num_images,
            hidden, triton.next_power_of_2(hidden), slots, int(len(table) ** 0.5), merge_size,
            quarter, triton.next_power_of_2(quarter),
        )  # fmt: skip
        return Positions(cu_seqlens, cos, sin)

    def norm(
        self, x: torch.Tensor, pending: torch.Tensor, norm: nn.LayerNorm, num_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        n, columns = x.shape
        out = torch.empty_like(x)
        block = triton.next_power_of_2(columns)
        triton_kernels.layer_norm[(n,)](
            x, pending, norm.weight, norm.bias, out, x if num_rows is None else num_rows, norm.eps,
            columns, block, num_rows is not None, num_warps=max(2, block // 2048),
        )  # fmt: skip
        return out

    def rotate_(self, qkv: torch.Tensor, positions: Positions) -> None:
        n, _, heads, head_dim = qkv.shape
        triton_kernels.rotate[(n,)](qkv, positions.cos, positions.sin, heads, head_dim // 2, 256, num_warps=1)

    def linear_gelu(self, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        # On CUDA this is tanh GELU in the product's epilogue; on a CPU the same call is the exact GELU.
        return torch._addmm_activation(linear.bias, x, linear.weight.t(), use_gelu=True)

    def add_linear_(self, x: torch.Tensor, y: torch.Tensor, linear: nn.Linear) -> None:
        x.addmm_(y, linear.weight.t())

    def mean_rows(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        images, columns = len(ends) - 1, x.shape[1]
        out = torch.empty(images, columns, dtype=torch.float32, device=x.device)
        block = 64
        triton_kernels.mean_rows[(images, triton.cdiv(columns, block))](
            x, x.stride(0), ends, out, columns, 32, block
        )
        return out


def select_kernels(device: torch.device, dtype: torch.dtype, *, fused: bool = True) -> Kernels:
    """Returns fused kernels if they are wanted and can run, else plain kernels."""
    half = dtype in (torch.bfloat16, torch.float16)
    if fused and half and device.type == "cuda" and HAS_TRITON:
        return FusedKernels()
    return PlainKernels()

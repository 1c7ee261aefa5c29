"""Variable-length attention over packed sequences: one call, several backends.

Every backend computes, for each sequence on its own, softmax(q kᵀ / sqrt(head_dim)) v without a mask. Knows
nothing of images or of the model around it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from models.errors import ModelError


@dataclass(frozen=True, eq=False)
class Sequences:
    """Where the packed sequences lie, on the device and on the host."""

    cu_seqlens: torch.Tensor  # int32 [sequences + 1], on the device
    lengths: tuple[int, ...]  # rows of each sequence

    @property
    def max_length(self) -> int:
        return max(self.lengths)


class Attention(Protocol):
    """q, k and v are [rows, heads, head_dim], possibly strided; so is the result, contiguous."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences
    ) -> torch.Tensor: ...


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """FlashAttention 2 as torch carries it. CUDA, bfloat16 or float16 only."""
    cu, longest = sequences.cu_seqlens, sequences.max_length
    out = varlen_attn(q, k, v, cu, cu, longest, longest)
    assert isinstance(out, torch.Tensor), "no auxiliary output was asked for"
    return out


def sdpa_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """`scaled_dot_product_attention`, a sequence at a time. Any device, any dtype."""
    outputs = []
    for parts in zip(*(x.split(sequences.lengths) for x in (q, k, v)), strict=True):
        heads_first = (part.transpose(0, 1).unsqueeze(0) for part in parts)  # [1, heads, rows, head_dim]
        outputs.append(F.scaled_dot_product_attention(*heads_first)[0].transpose(0, 1))
    return torch.cat(outputs)


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences
) -> torch.Tensor:
    """The formula, a sequence at a time, in float64: what the backends are tested against."""
    outputs = []
    for parts in zip(*(x.double().split(sequences.lengths) for x in (q, k, v)), strict=True):
        query, key, value = (part.transpose(0, 1) for part in parts)  # [heads, rows, head_dim]
        weights = (query @ key.transpose(1, 2) / query.shape[-1] ** 0.5).softmax(dim=-1)
        outputs.append((weights @ value).transpose(0, 1))
    return torch.cat(outputs).to(q.dtype)


_FLASH_DTYPES = (torch.bfloat16, torch.float16)


def _check_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    if device.type != "cuda":
        raise ModelError(f"attention backend FLASH_ATTN needs a CUDA device, not {device}")
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise ModelError("attention backend FLASH_ATTN needs a GPU of compute capability 8.0 or newer")
    if dtype not in _FLASH_DTYPES:
        raise ModelError(f"attention backend FLASH_ATTN needs bfloat16 or float16, not {dtype}")
    if head_dim % 8 != 0 or head_dim > 256:
        raise ModelError(f"attention backend FLASH_ATTN cannot serve a head dimension of {head_dim}")


def _check_sdpa(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Serves everything."""


_BACKENDS: dict[str, tuple[Attention, Callable[[torch.device, torch.dtype, int], None]]] = {
    "FLASH_ATTN": (flash_attention, _check_flash),
    "TORCH_SDPA": (sdpa_attention, _check_sdpa),
}
BACKENDS = tuple(_BACKENDS)  # fastest first


def select_attention(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[str, Attention]:
    """The named backend, or with `auto` the fastest that can serve; returns its name with it.

    Raises `ModelError` where the named backend cannot serve that device, dtype or head dimension.
    """
    if name == "auto":
        for candidate, (attention, check) in _BACKENDS.items():
            try:
                check(device, dtype, head_dim)
            except ModelError:
                continue
            return candidate, attention
    if name not in _BACKENDS:
        raise ModelError(f"attention backend {name!r} is not one of auto, {', '.join(BACKENDS)}")
    attention, check = _BACKENDS[name]
    check(device, dtype, head_dim)
    return name, attention

"""Variable-length attention over packed sequences: one call, several backends.

Every backend computes softmax(q kᵀ / sqrt(head_dim)) v for each sequence, without a mask. Knows nothing of
images or of the model.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F

from models.errors import ModelError


@dataclass(frozen=True, eq=False)
class Sequences:
    """The positions of packed sequences."""

    cu_seqlens: torch.Tensor  # int32 [sequences + 1], on the device; later rows belong to no sequence
    max_length: int  # no sequence has more rows


class Attention(Protocol):
    """q, k and v are [rows, heads, head_dim], possibly strided; the result has their shape and is contiguous.

    There is at least one sequence. Rows of the result that belong to no sequence hold any values.
    """

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences
    ) -> torch.Tensor: ...


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """FlashAttention 2, as included in torch. CUDA, bfloat16 or float16 only."""
    cu, longest = sequences.cu_seqlens, sequences.max_length
    return _flash_2()(q, k, v, cu, cu, longest, longest)


def flash_attention_4(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences
) -> torch.Tensor:
    """FlashAttention 4, from the package flash-attn-4. Hopper and Blackwell, bfloat16 or float16 only.

    The kernel is compiled at its first call. The package's own tiles are for long inputs. On short inputs
    smaller tiles are a sixth to a third faster, and only the package's inner function accepts a tile.
    """
    cu, longest = sequences.cu_seqlens, sequences.max_length
    num_rows, num_heads, head_dim = q.shape
    gpu = torch.cuda.get_device_properties(q.device)
    return _flash_4()(
        q,
        k,
        v,
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        tile_mn=small_tile(num_rows, num_heads, head_dim, gpu),
    )[0]


_PACKAGE_ROWS = 192  # of q in flash-attn-4's own tile, on Hopper and for head dimensions up to 96


class Processors(Protocol):
    """The part of `torch.cuda.get_device_properties` that the choice of a tile needs."""

    @property
    def major(self) -> int: ...

    @property
    def multi_processor_count(self) -> int: ...


def small_tile(num_rows: int, num_heads: int, head_dim: int, gpu: Processors) -> tuple[int, int] | None:
    """Returns the rows of q and of k that one block works on, or None if the package's own tile is best.

    A multiprocessor runs one block at a time, and a block with fewer rows of q takes nearly as long. So the
    best block is the smallest that needs no more rounds than the package's, and at most two. All rows are
    counted as one sequence, because most small batches have one image. Several sequences may need one more
    round.
    """
    if gpu.major != 9 or not 64 < head_dim <= 96:
        return None  # measured on Hopper with head dimension 72 only

    def rounds(rows: int) -> int:
        return math.ceil(math.ceil(num_rows / rows) * num_heads / gpu.multi_processor_count)

    for rows in (64, 128):
        if rounds(rows) <= min(2, rounds(_PACKAGE_ROWS)):
            return rows, 80
    return None


def sdpa_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """`scaled_dot_product_attention` for one sequence after the other. Any device, any dtype.

    A CUDA graph cannot hold it, because the host reads the ends of sequences.
    """

    def attend(*parts: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.transpose(0, 1).unsqueeze(0) for part in parts
        )  # [1, heads, rows, head_dim]
        return F.scaled_dot_product_attention(query, key, value)[0].transpose(0, 1)

    return _for_each_sequence(attend, q, k, v, sequences)


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences
) -> torch.Tensor:
    """The formula in float64, for one sequence after the other. Tests compare the backends with it."""

    def attend(*parts: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.double().transpose(0, 1) for part in parts)  # [heads, rows, head_dim]
        scores: torch.Tensor = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        return (scores.softmax(dim=-1) @ value).transpose(0, 1).to(q.dtype)

    return _for_each_sequence(attend, q, k, v, sequences)


def _for_each_sequence(
    attend: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for first, last in pairwise(sequences.cu_seqlens.tolist()):
        if first < last:
            out[first:last] = attend(q[first:last], k[first:last], v[first:last])
    return out


HALF_DTYPES = (torch.bfloat16, torch.float16)


def _check_flash(name: str, capability: int, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    if device.type != "cuda":
        raise ModelError(f"attention backend {name} needs a CUDA device, not {device}")
    if torch.cuda.get_device_capability(device)[0] < capability:
        raise ModelError(
            f"attention backend {name} needs a GPU of compute capability {capability}.0 or newer"
        )
    if dtype not in HALF_DTYPES:
        raise ModelError(f"attention backend {name} needs bfloat16 or float16, not {dtype}")
    if head_dim % 8 != 0 or head_dim > 256:
        raise ModelError(f"attention backend {name} cannot serve a head dimension of {head_dim}")


def _check_flash_2(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    _check_flash("FLASH_ATTN", 8, device, dtype, head_dim)
    _flash_2()


def _check_flash_4(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    _check_flash("FLASH_ATTN_4", 9, device, dtype, head_dim)
    _flash_4()


@cache
def _flash_2() -> Callable[..., torch.Tensor]:
    """Returns torch's function. The import takes a second, and a CPU does not need it."""
    function: Callable[..., torch.Tensor] = import_module("torch.nn.attention.varlen").varlen_attn
    return function


@cache
def _flash_4() -> Callable[..., tuple[torch.Tensor, ...]]:
    """Returns the optional package's function. Raises `ModelError` if it is missing or another version."""
    try:
        interface = import_module("flash_attn.cute.interface")
        function: Callable[..., tuple[torch.Tensor, ...]] = interface._flash_attn_fwd
        inspect.signature(function).parameters["tile_mn"]
    except (ImportError, AttributeError, KeyError) as error:
        raise ModelError(
            f"attention backend FLASH_ATTN_4 needs the package flash-attn-4, of the extra `gpu`: {error}"
        ) from None
    return function


def _check_sdpa(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Supports every device, dtype and head dimension."""


@dataclass(frozen=True)
class Backend:
    """An implementation of attention."""

    name: str
    attention: Attention
    check: Callable[[torch.device, torch.dtype, int], None]  # raises `ModelError`
    in_graphs: bool  # a CUDA graph can hold it


_BACKENDS = (  # fastest first
    Backend("FLASH_ATTN_4", flash_attention_4, _check_flash_4, in_graphs=True),
    Backend("FLASH_ATTN", flash_attention, _check_flash_2, in_graphs=True),
    Backend("TORCH_SDPA", sdpa_attention, _check_sdpa, in_graphs=False),
)
BACKENDS = tuple(backend.name for backend in _BACKENDS)


def select_attention(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Backend:
    """Returns the named backend, or for `auto` the fastest that supports device, dtype and head dimension.

    Raises `ModelError` if the named backend does not support them.
    """
    if name == "auto":
        return next(backend for backend in _BACKENDS if _serves(backend, device, dtype, head_dim))
    for backend in _BACKENDS:
        if backend.name == name:
            backend.check(device, dtype, head_dim)
            return backend
    raise ModelError(f"attention backend {name!r} is not one of auto, {', '.join(BACKENDS)}")


def _serves(backend: Backend, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    try:
        backend.check(device, dtype, head_dim)
    except ModelError:
        return False
    return True

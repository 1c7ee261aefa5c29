from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from models.attention import (
    BACKENDS,
    Sequences,
    reference_attention,
    sdpa_attention,
    select_attention,
    small_tile,
)
from models.budgets import infer_warm_up
from models.errors import ModelError
from tests.support.checkpoints import relative_error

CPU = torch.device("cpu")


def packed(lengths: tuple[int, ...], heads: int = 4, head_dim: int = 72) -> tuple[torch.Tensor, Sequences]:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(sum(lengths), 3, heads, head_dim, generator=generator)
    ends = torch.tensor(lengths).cumsum(0)
    return qkv, Sequences(torch.cat([torch.zeros(1), ends]).int(), max(lengths))


@pytest.mark.parametrize("lengths", [(5,), (1, 1, 1), (64, 3, 200), (17, 129)])
def test_sdpa_equals_the_formula_on_strided_input(lengths: tuple[int, ...]) -> None:
    qkv, sequences = packed(lengths)
    q, k, v = qkv.unbind(1)
    out = sdpa_attention(q, k, v, sequences)
    assert out.shape == (sum(lengths), 4, 72)
    assert out.is_contiguous()
    assert relative_error(out, reference_attention(q, k, v, sequences)) < 1e-6


def test_rows_after_the_last_sequence_and_empty_sequences_are_skipped() -> None:
    qkv, exact = packed((5, 9))
    padded = torch.cat([qkv, torch.full((3, *qkv.shape[1:]), torch.nan)])
    slots = Sequences(torch.tensor([0, 5, 14, 14, 14], dtype=torch.int32), 17)
    (q, k, v), (more_q, more_k, more_v) = qkv.unbind(1), padded.unbind(1)
    for attention in (sdpa_attention, reference_attention):
        out = attention(more_q, more_k, more_v, slots)
        assert torch.equal(out[:14], attention(q, k, v, exact))
        assert torch.equal(out[14:], torch.zeros_like(out[14:]))


def test_reference_is_softmax_attention() -> None:
    qkv, sequences = packed((3, 2), heads=1, head_dim=4)
    q, k, v = qkv.unbind(1)
    weights = torch.exp(q[:3, 0].double() @ k[:3, 0].double().T / 2)
    expected = (weights / weights.sum(1, keepdim=True)) @ v[:3, 0].double()
    assert relative_error(reference_attention(q, k, v, sequences)[:3, 0], expected) < 1e-6


def test_auto_selects_a_backend_that_supports_the_device() -> None:
    backend = select_attention("auto", CPU, torch.float32, 72)
    assert (backend.name, backend.attention, backend.in_graphs) == ("TORCH_SDPA", sdpa_attention, False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FLASH_ATTN", "FLASH_ATTN needs a CUDA device, not cpu"),
        ("FLASH_ATTN_4", "FLASH_ATTN_4 needs a CUDA device, not cpu"),
        ("XFORMERS", "'XFORMERS' is not one of auto, FLASH_ATTN_4, FLASH_ATTN, TORCH_SDPA"),
    ],
)
def test_backend_without_support_for_the_device_is_an_error(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        select_attention(name, CPU, torch.bfloat16, 72)


def test_backends_are_the_documented_ones() -> None:
    assert BACKENDS == ("FLASH_ATTN_4", "FLASH_ATTN", "TORCH_SDPA")


@dataclass(frozen=True)
class Gpu:
    major: int
    multi_processor_count: int


@pytest.mark.parametrize(
    ("num_rows", "tile"),
    [
        (400, (64, 80)),
        (512, (64, 80)),
        (513, (128, 80)),
        (1024, (128, 80)),
        (1025, None),  # the GPU cannot run nine blocks of 128 rows for each head at once, but six of 192
        (1536, None),
        (1537, (128, 80)),  # both need two rounds
        (2048, (128, 80)),
        (2049, None),
        (62500, None),
    ],
)
def test_small_tiles_need_no_more_rounds_than_large_ones(num_rows: int, tile: tuple[int, int] | None) -> None:
    assert small_tile(num_rows, 16, 72, Gpu(9, 132)) == tile


@pytest.mark.parametrize(
    ("head_dim", "gpu", "tile"),
    [
        (72, Gpu(9, 132), (64, 80)),
        (72, Gpu(9, 78), (128, 80)),
        (96, Gpu(9, 132), (64, 80)),
        (64, Gpu(9, 132), None),
        (128, Gpu(9, 132), None),
        (72, Gpu(10, 148), None),
    ],
)
def test_small_tiles_are_used_only_where_they_were_measured(
    head_dim: int, gpu: Gpu, tile: tuple[int, int] | None
) -> None:
    assert small_tile(400, 16, head_dim, gpu) == tile


@pytest.mark.parametrize("num_processors", [78, 114, 132])
@pytest.mark.parametrize("smallest", [1, 7, 64, 100, 257, 300, 384, 600, 5000])
def test_warm_up_compiles_every_tile_of_eager_runs(smallest: int, num_processors: int) -> None:
    def tile(tokens: int) -> tuple[int, int] | None:
        return small_tile(4 * tokens, 16, 72, Gpu(9, num_processors))

    for above in (0, smallest, 2 * smallest):
        compiled = {tile(tokens) for tokens in infer_warm_up(smallest, 16384, above)}
        if above:
            compiled.add(tile(above))  # by its graph
        assert {tile(tokens) for tokens in range(max(smallest, above + 1), 16385)} <= compiled

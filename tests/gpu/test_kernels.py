"""Compares the fused kernels with the plain kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.kernels import FusedKernels, PlainKernels
from tests.support.checkpoints import relative_error

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
FUSED, PLAIN = FusedKernels(), PlainKernels()
DTYPES = [torch.bfloat16, torch.float16]
EXACT = 4e-3  # one rounding to bfloat16, which both may do at different steps


def rand(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(GPU).manual_seed(sum(shape))
    return torch.randn(*shape, device=GPU, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_centered_pixels_are_equal(dtype: torch.dtype) -> None:
    pixels = torch.arange(256, dtype=torch.uint8, device=GPU).repeat(37).view(37, 256)
    assert torch.equal(FUSED.center_pixels(pixels, dtype), PLAIN.center_pixels(pixels, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "grids", [[(20, 20)], [(2, 3620)], [(250, 250)], [(64, 48), (2, 398), (16, 16), (0, 0), (0, 0)]]
)
def test_positions_are_equal(dtype: torch.dtype, grids: list[tuple[int, int]]) -> None:
    real = sum(h * w for h, w in grids)
    x, table = rand(real + 77, 1152, dtype=dtype), rand(2304, 1152, dtype=dtype)
    frequencies = 10000 ** -(torch.arange(18, device=GPU) / 18)
    on_device = torch.tensor(grids, dtype=torch.int32, device=GPU)
    one, other = x.clone(), x.clone()
    ours = FUSED.add_positions_(one, table, on_device, frequencies, 2)
    theirs = PLAIN.add_positions_(other, table, on_device, frequencies, 2)
    assert torch.equal(ours.cu_seqlens, theirs.cu_seqlens)
    assert relative_error(ours.cos[:real], theirs.cos[:real]) < 1e-5
    assert relative_error(ours.sin[:real], theirs.sin[:real]) < 1e-5
    assert relative_error(one[:real], other[:real]) < EXACT
    assert one.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1152), (1000, 1152), (250, 4608), (33, 1024)])
@pytest.mark.parametrize("masked", [False, True])
def test_norms_are_equal(dtype: torch.dtype, rows: int, columns: int, masked: bool) -> None:
    x, pending = rand(rows, columns, dtype=dtype), rand(columns, dtype=torch.float32)
    norm = nn.LayerNorm(columns, eps=1e-6, device=GPU, dtype=dtype).requires_grad_(False)
    norm.weight.copy_(rand(columns, dtype=dtype))
    norm.bias.copy_(rand(columns, dtype=dtype))
    num_rows = torch.tensor([rows - rows // 3], dtype=torch.int32, device=GPU) if masked else None
    if masked:
        x[rows - rows // 3 :] = torch.nan
    whole = (x.float() + pending).to(torch.float32)
    exact = nn.functional.layer_norm(whole, (columns,), norm.weight.float(), norm.bias.float(), 1e-6)
    out = FUSED.norm(x, pending, norm, num_rows)
    real = rows - rows // 3 if masked else rows
    assert relative_error(out[:real], exact[:real]) < EXACT
    assert not out[real:].any()
    plain = PLAIN.norm(x, pending, norm, num_rows)
    same = FUSED.norm(x, torch.zeros_like(pending), norm, num_rows)
    assert relative_error(same, plain) < EXACT


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 72), (16, 64), (12, 64), (4, 32)])
def test_rotation_is_equal_and_does_not_change_v(dtype: torch.dtype, heads: int, head_dim: int) -> None:
    qkv = rand(301, 3, heads, head_dim, dtype=dtype)
    grids = torch.tensor([[14, 20], [2, 2]], dtype=torch.int32, device=GPU)
    table = rand(16, 64, dtype=dtype)
    frequencies = 100 ** -(torch.arange(head_dim // 4, device=GPU) / 18)
    positions = FUSED.add_positions_(rand(301, 64, dtype=dtype), table, grids, frequencies, 2)
    one, other = qkv.clone(), qkv.clone()
    FUSED.rotate_(one, positions)
    PLAIN.rotate_(other, positions)
    assert relative_error(one, other) < EXACT
    assert torch.equal(one[:, 2], qkv[:, 2])
    assert relative_error(one[:, :2], qkv[:, :2]) > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_in_the_product_is_the_tanh_form(dtype: torch.dtype) -> None:
    linear = nn.Linear(1152, 4352, device=GPU, dtype=dtype).requires_grad_(False)
    linear.bias.mul_(10)
    x = rand(400, 1152, dtype=dtype) * 4
    exact = x.double() @ linear.weight.double().T + linear.bias.double()
    tanh = nn.functional.gelu(exact, approximate="tanh")
    error = relative_error(FUSED.linear_gelu(x, linear), tanh)
    assert error < EXACT
    assert error <= 1.05 * relative_error(PLAIN.linear_gelu(x, linear), tanh)


@pytest.mark.parametrize("dtype", DTYPES)
def test_added_products_are_equal_except_for_the_bias(dtype: torch.dtype) -> None:
    linear = nn.Linear(1152, 1152, device=GPU, dtype=dtype).requires_grad_(False)
    x, y = rand(400, 1152, dtype=dtype), rand(400, 1152, dtype=dtype) * 2
    one, other = x.clone(), x.clone()
    FUSED.add_linear_(one, y, linear)
    PLAIN.add_linear_(other, y, linear)
    assert relative_error(one.float() + linear.bias, other) < EXACT


@pytest.mark.parametrize("lengths", [[64], [1, 2, 31, 32, 33], [16384], [100] * 20, [5, 0, 7]])
def test_means_are_equal(lengths: list[int]) -> None:
    ends = torch.tensor([0, *lengths], device=GPU).cumsum(0).int()
    x = rand(2, sum(lengths) + 5, 4096, dtype=torch.bfloat16)[1]
    ours = FUSED.mean_rows(x, ends)
    for mean, rows in zip(ours, x[: sum(lengths)].split(lengths), strict=True):
        if len(rows):
            assert relative_error(mean, rows.double().mean(0)) < 1e-5

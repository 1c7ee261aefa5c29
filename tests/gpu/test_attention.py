from __future__ import annotations

import pytest
import torch

from models.attention import BACKENDS, Sequences, reference_attention, select_attention
from models.errors import ModelError
from tests.support.checkpoints import relative_error

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


def attend(
    backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences
) -> torch.Tensor:
    try:
        chosen = select_attention(backend, GPU, q.dtype, q.shape[-1])
    except ModelError as error:
        pytest.skip(str(error))
    return chosen.attention(q, k, v, sequences)


LENGTHS = [(400,), (700,), (400,) * 4, (64, 256, 1024), (4, 796, 4096, 16), (100, 0, 300, 0, 0)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("lengths", "head_dim", "dtype"),
    [(lengths, 72, torch.bfloat16) for lengths in LENGTHS]
    + [((400,) * 4, 64, torch.bfloat16), ((400,) * 4, 72, torch.float16)],
)
def test_backends_equal_the_formula_on_strided_input(
    backend: str, lengths: tuple[int, ...], head_dim: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator(GPU).manual_seed(0)
    real = sum(lengths)
    qkv = torch.randn(real + 112, 3, 16, head_dim, generator=generator, device=GPU).to(dtype)
    ends = torch.tensor((0, *lengths)).cumsum(0).int().to(GPU)
    sequences = Sequences(ends, real + 112)
    q, k, v = qkv.unbind(1)
    out = attend(backend, q, k, v, sequences)
    assert out.shape == q.shape
    assert relative_error(out[:real], reference_attention(q, k, v, sequences)[:real]) < 5e-3


@pytest.mark.parametrize("name", ["FLASH_ATTN", "FLASH_ATTN_4"])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.float32, 72), (torch.bfloat16, 70), (torch.bfloat16, 320)]
)
def test_flash_attention_rejects_unsupported_input(name: str, dtype: torch.dtype, head_dim: int) -> None:
    with pytest.raises(ModelError, match=name):
        select_attention(name, GPU, dtype, head_dim)


def test_auto_selects_the_fastest_backend() -> None:
    chosen = select_attention("auto", GPU, torch.bfloat16, 72)
    assert chosen.name.startswith("FLASH_ATTN")
    assert chosen.in_graphs

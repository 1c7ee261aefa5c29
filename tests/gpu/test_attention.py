from __future__ import annotations

import pytest
import torch

from models.attention import Sequences, reference_attention, select_attention
from models.errors import ModelError
from tests.checkpoints import relative_error

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TORCH_SDPA"])
@pytest.mark.parametrize("lengths", [(400,), (64, 256, 1024), (4, 796, 4096, 16)])
def test_backends_equal_the_formula_on_strided_input(backend: str, lengths: tuple[int, ...]) -> None:
    generator = torch.Generator(GPU).manual_seed(0)
    qkv = torch.randn(sum(lengths), 3, 16, 72, generator=generator, device=GPU).bfloat16()
    ends = torch.tensor((0, *lengths)).cumsum(0).int().to(GPU)
    sequences = Sequences(ends, lengths)
    _, attention = select_attention(backend, GPU, torch.bfloat16, 72)
    out = attention(*qkv.unbind(1), sequences)
    assert relative_error(out, reference_attention(*qkv.unbind(1), sequences)) < 5e-3


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.float32, 72), (torch.bfloat16, 70), (torch.bfloat16, 320)]
)
def test_flash_attention_says_what_it_cannot_serve(dtype: torch.dtype, head_dim: int) -> None:
    with pytest.raises(ModelError, match="FLASH_ATTN"):
        select_attention("FLASH_ATTN", GPU, dtype, head_dim)

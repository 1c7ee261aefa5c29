"""The encoder at the size of the 8B checkpoint, on a GPU, against transformers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import Qwen3VLVisionModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from models import EncodeItem, OutputSpec, Patches, VisionEncoder
from models.config import VisionConfig
from models.demo import PREPROCESS
from models.weights import Checkpoint
from tests.checkpoints import randomize, reference_tokens, relative_error

pytestmark = pytest.mark.gpu

HALF = [0.5, 0.5, 0.5]
GPU = torch.device("cuda", 0)
CONFIG_8B = VisionConfig(
    depth=27, hidden_size=1152, num_heads=16, intermediate_size=4304, out_hidden_size=4096, patch_size=16,
    temporal_patch_size=2, spatial_merge_size=2, in_channels=3, num_position_embeddings=2304,
    rope_theta=10000.0, deepstack_visual_indexes=(8, 16, 24),
)  # fmt: skip


class StateDictTensors:
    """A module's own tensors, as a checkpoint would hold them."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors = {name: x.detach().cpu() for name, x in module.state_dict().items()}

    def names(self) -> Sequence[str]:
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name]


@pytest.fixture(scope="module")
def reference() -> nn.Module:
    """transformers' vision model in float32, its weights as a bfloat16 checkpoint would hold them."""
    config = Qwen3VLVisionConfig(out_hidden_size=4096, deepstack_visual_indexes=[8, 16, 24])
    with GPU:
        model: nn.Module = Qwen3VLVisionModel(config).eval()
    model.cpu()
    randomize(model)
    return with_parameters(with_parameters(model, torch.bfloat16), torch.float32).to(GPU)


@pytest.fixture(scope="module")
def half(reference: nn.Module) -> nn.Module:
    """The same in bfloat16."""
    return with_parameters(copy.deepcopy(reference), torch.bfloat16)


def with_parameters(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Converts the parameters and leaves buffers (rotary frequencies) in float32, as loading does."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module


@pytest.fixture(scope="module")
def encoder(reference: nn.Module) -> VisionEncoder:
    limits = replace(PREPROCESS, max_pixels=16777216)
    return VisionEncoder(
        Checkpoint(CONFIG_8B, limits, StateDictTensors(reference), None), GPU, torch.bfloat16, "auto"
    )


def patches(*grids: tuple[int, int]) -> list[Patches]:
    generator = torch.Generator().manual_seed(sum(h * w for h, w in grids))
    return [
        Patches(
            torch.randint(0, 256, (h * w, 768), dtype=torch.uint8, generator=generator),
            (1, h, w),
            h * w // 4,
        )
        for h, w in grids
    ]


MIXED = [(20, 20), (24, 32), (32, 32), (64, 64), (16, 16), (48, 48), (2, 398), (40, 40)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("grids", [MIXED[:1], MIXED, MIXED * 5, [(250, 250)]], ids=["1", "8", "40", "62500"])
def test_bfloat16_is_as_exact_as_the_reference(
    reference: nn.Module, half: nn.Module, encoder: VisionEncoder, grids: list[tuple[int, int]]
) -> None:
    images = patches(*grids)
    expected = reference_tokens(reference, images, HALF, HALF)
    rounded = reference_tokens(half, images, HALF, HALF)
    tokens = torch.cat(encoder.encode(images))
    for level in range(4):
        ours, theirs, truth = (x[:, level * 4096 : (level + 1) * 4096] for x in (tokens, rounded, expected))
        bound = relative_error(theirs, truth)
        print(f"level {level}: {relative_error(ours, truth):.5f}, reference {bound:.5f}")  # noqa: T201
        assert relative_error(ours, truth) <= 1.15 * bound


def test_auto_takes_flash_attention(encoder: VisionEncoder) -> None:
    assert encoder.attn_backend.startswith("FLASH_ATTN")


def test_pooled_vectors_are_made_on_the_device(encoder: VisionEncoder) -> None:
    images = patches(*MIXED)
    pooled = OutputSpec(pooled=True, normalize=True, deepstack=False, dtype=torch.float32)
    result = encoder.run([EncodeItem(image, pooled) for image in images])
    for vector, tokens in zip(result.embeddings, encoder.encode(images), strict=True):
        mean = tokens[:, :4096].double().mean(0).cpu()
        assert relative_error(vector, mean / mean.norm()) < 1e-5
    assert result.stats.busy_s > 0


def test_float32_runs_by_sdpa(reference: nn.Module) -> None:
    checkpoint = Checkpoint(CONFIG_8B, PREPROCESS, StateDictTensors(reference), None)
    exact = VisionEncoder(checkpoint, GPU, torch.float32, "auto")
    assert exact.attn_backend == "TORCH_SDPA"
    images = patches(*MIXED)
    expected = reference_tokens(reference, images, HALF, HALF)
    assert relative_error(torch.cat(exact.encode(images)), expected) <= 1e-5

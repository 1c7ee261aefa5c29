"""The vision model of the 8B checkpoint with random weights, and a checkpoint with the same weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import Qwen3VLVisionModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from models.config import VisionConfig
from models.demo import PREPROCESS
from models.weights import Checkpoint
from tests.support.checkpoints import randomize

CONFIG_8B = VisionConfig(
    depth=27, hidden_size=1152, num_heads=16, intermediate_size=4304, out_hidden_size=4096, patch_size=16,
    temporal_patch_size=2, spatial_merge_size=2, in_channels=3, num_position_embeddings=2304,
    rope_theta=10000.0, deepstack_visual_indexes=(8, 16, 24),
)  # fmt: skip


class StateDictTensors:
    """The tensors of a module in the form of a checkpoint."""

    def __init__(self, module: nn.Module) -> None:
        state: dict[str, torch.Tensor] = module.state_dict()
        self._tensors = {name: x.detach().cpu() for name, x in state.items()}

    def names(self) -> Sequence[str]:
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def with_parameters(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Converts the parameters. Buffers (rotary frequencies) stay in float32, as after loading."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module


@pytest.fixture(scope="session")
def reference() -> nn.Module:
    """transformers' vision model in float32, with weights that are rounded to bfloat16."""
    config = Qwen3VLVisionConfig(out_hidden_size=4096, deepstack_visual_indexes=[8, 16, 24])
    with torch.device("cuda"):
        model: nn.Module = Qwen3VLVisionModel(config).eval()
    randomize(model.cpu())
    return with_parameters(with_parameters(model, torch.bfloat16), torch.float32).cuda()


@pytest.fixture(scope="session")
def half(reference: nn.Module) -> nn.Module:
    """The same in bfloat16."""
    return with_parameters(copy.deepcopy(reference), torch.bfloat16)


@pytest.fixture(scope="session")
def checkpoint(half: nn.Module) -> Checkpoint:
    return Checkpoint(CONFIG_8B, replace(PREPROCESS, max_pixels=16777216), StateDictTensors(half), None)

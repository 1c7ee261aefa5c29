"""Seeded random weights: the built-in demo model, and the shapes of real checkpoints for benchmarks.

Neither needs a download. The vectors have no meaning, but they are the same on every start.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from models.config import VisionConfig
from models.preprocess import PreprocessConfig
from models.qwen3_vl import checkpoint_shapes
from models.weights import Checkpoint

DEMO = "demo"

VISION = VisionConfig(
    depth=4,
    hidden_size=128,
    num_heads=4,
    intermediate_size=256,
    out_hidden_size=128,
    patch_size=16,
    temporal_patch_size=2,
    spatial_merge_size=2,
    in_channels=3,
    num_position_embeddings=2304,
    rope_theta=10000.0,
    deepstack_visual_indexes=(1, 2),
)
# As Qwen3-VL's, but with a lower `max_pixels`: attention is quadratic, and this model is for CPUs.
PREPROCESS = PreprocessConfig(
    patch_size=16,
    temporal_patch_size=2,
    merge_size=2,
    min_pixels=65536,
    max_pixels=1048576,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    rescale_factor=1 / 255,
)


_8B = replace(
    VISION,
    depth=27,
    hidden_size=1152,
    num_heads=16,
    intermediate_size=4304,
    out_hidden_size=4096,
    deepstack_visual_indexes=(8, 16, 24),
)
_2B = replace(
    VISION,
    depth=24,
    hidden_size=1024,
    num_heads=16,
    intermediate_size=4096,
    out_hidden_size=2048,
    deepstack_visual_indexes=(5, 11, 17),
)
RANDOM_SIZES = {"demo": VISION, "2B": _2B, "8B": _8B}


class RandomTensors:
    """Random tensors of the given shapes. Each depends only on its name."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._made: dict[str, torch.Tensor] = {}  # kept, because making them takes longer than reading a file

    def names(self) -> Sequence[str]:
        return sorted(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def get(self, name: str) -> torch.Tensor:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> torch.Tensor:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        values = np.random.default_rng(seed).standard_normal(self._shapes[name], dtype=np.float32)
        if "norm" in name:
            values = values * 0.1 + (1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("bias"):
            values *= 0.1
        elif name != "pos_embed.weight":
            values /= np.sqrt(np.prod(self._shapes[name][1:]))  # keeps the size of activations
        return torch.from_numpy(values.astype(np.float32, copy=False))


def demo_checkpoint() -> Checkpoint:
    """Returns the demo model."""
    return Checkpoint(VISION, PREPROCESS, RandomTensors(checkpoint_shapes(VISION)), revision=None)


def random_checkpoint(size: str) -> Checkpoint:
    """Returns random weights in the shape of a Qwen3-VL checkpoint. `KeyError` for an unknown size."""
    vision = RANDOM_SIZES[size]
    limits = replace(PREPROCESS, max_pixels=16777216)
    return Checkpoint(vision, limits, RandomTensors(checkpoint_shapes(vision)), revision=None)

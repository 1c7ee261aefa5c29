"""The implementations that `bench encoder` compares, all with the same weights on the same device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import Qwen3VLVisionModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from models import Checkpoint, CudaGraphSettings, Patches, VisionEncoder

SIDES = ("transformers", "eager-plain", "eager", "graph-plain", "graph")


@dataclass(frozen=True)
class Start:
    """What it took to get ready: graphs captured, their seconds and their memory."""

    num_graphs: int = 0
    capture_seconds: float = 0.0
    graph_memory_bytes: int = 0


@dataclass(frozen=True)
class Side:
    """One implementation. `encode` starts a batch on the device; `padding` counts padded tokens so far."""

    name: str
    attn_backend: str
    encode: Callable[[Sequence[Patches]], object]
    padding: Callable[[], int]
    start: Start


def make_side(
    name: str,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    attn_backend: str,
    budget_steps: int,
) -> Side:
    """`transformers`: its model, eager, SDPA. `eager` and `graph`: ours; `-plain`: without fused kernels."""
    if name == "transformers":
        reference = Reference(checkpoint, device, dtype)
        return Side(name, "SDPA", reference.encode, lambda: 0, Start())
    encoder = VisionEncoder(
        checkpoint,
        device,
        dtype=dtype,
        attn_backend=attn_backend,
        cuda_graphs=CudaGraphSettings(budget_steps=budget_steps) if name.startswith("graph") else None,
        fused_kernels=not name.endswith("-plain"),
    )
    graphs = encoder.graphs
    start = Start(len(graphs.graphs), graphs.capture_seconds, graphs.memory_bytes)
    return Side(name, encoder.attn_backend, encoder.encode, lambda: graphs.counts.padding_tokens, start)


class Reference:
    """transformers' vision model with the weights of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        vision = checkpoint.vision
        config = Qwen3VLVisionConfig(
            depth=vision.depth,
            hidden_size=vision.hidden_size,
            num_heads=vision.num_heads,
            intermediate_size=vision.intermediate_size,
            out_hidden_size=vision.out_hidden_size,
            num_position_embeddings=vision.num_position_embeddings,
            deepstack_visual_indexes=list(vision.deepstack_visual_indexes),
            rope_parameters={"rope_type": "axial", "rope_theta": vision.rope_theta},
        )
        config._attn_implementation = "sdpa"
        with device:
            self._model = Qwen3VLVisionModel(config).eval()
        self._model.load_state_dict(
            {name: checkpoint.tensors.get(name) for name in checkpoint.tensors.names()}
        )
        for parameter in self._model.parameters():
            parameter.data = parameter.data.to(dtype)
        self._device = device
        self._dtype = dtype
        self._mean, self._std = checkpoint.preprocess.mean[0], checkpoint.preprocess.std[0]
        self._frames = vision.temporal_patch_size
        self._channels = vision.in_channels

    def encode(self, images: Sequence[Patches]) -> object:
        """Pixels are normalized on the device: cheaper than the floats that its processor would send."""
        pixels = torch.cat([image.pixels for image in images]).to(self._device, self._dtype)
        pixels = (pixels / 255 - self._mean) / self._std
        still = pixels.unflatten(1, (self._channels, 1, -1)).expand(-1, -1, self._frames, -1)
        grids = torch.tensor([image.grid_thw for image in images], device=self._device)
        with torch.inference_mode():
            return self._model(still.flatten(1), grids)

"""The implementations (sides) that `bench encoder` compares. All have the same weights on the same device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from transformers import Qwen3VLVisionModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from models import (
    BatchResult,
    Checkpoint,
    CudaGraphSettings,
    EncodeItem,
    OutputSpec,
    Patches,
    Replica,
    ReplicaGroup,
    VisionEncoder,
    replica_devices,
)

SIDES = ("transformers", "eager-plain", "eager", "graph-plain", "graph")


@dataclass(frozen=True)
class Start:
    """The cost of the start: number of captured graphs, time to capture them, and their memory."""

    num_graphs: int = 0
    capture_seconds: float = 0.0
    graph_memory_bytes: int = 0


@dataclass(frozen=True)
class Side:
    """One implementation.

    `encode` starts a batch. `wait` waits for the devices. `padding` returns the number of padded tokens so
    far. Replicas also have `submit`, which starts a batch and copies its vectors to the host.
    """

    name: str
    attn_backend: str
    encode: Callable[[Sequence[Patches]], object]
    wait: Callable[[], None]
    padding: Callable[[], int]
    start: Start
    submit: Callable[[Sequence[Patches]], Future[BatchResult]] | None = None
    num_devices: int = 1
    close: Callable[[], None] = lambda: None


def make_side(
    name: str,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    *,
    attn_backend: str,
    budget_steps: int,
    num_replicas: int | None,
) -> Side:
    """Makes a side by its name.

    `transformers` is its model, eager with SDPA. `eager` and `graph` are ours; `-plain` means without fused
    kernels. With `num_replicas`, ours run as replicas on the first devices of the type of `device`. Raises
    `ModelError` if there are too few devices.
    """

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    if name == "transformers":
        reference = Reference(checkpoint, device, dtype)
        return Side(name, "SDPA", reference.encode, wait, lambda: 0, Start())
    load = partial(
        VisionEncoder,
        checkpoint,
        dtype=dtype,
        attn_backend=attn_backend,
        cuda_graphs=CudaGraphSettings(budget_steps=budget_steps) if name.startswith("graph") else None,
        fused_kernels=not name.endswith("-plain"),
    )
    if num_replicas:
        return _side_of_replicas(name, load, replica_devices(device.type, num_replicas))
    encoder = load(device)
    graphs = encoder.graphs
    return Side(
        name,
        encoder.attn_backend,
        encoder.encode,
        wait,
        lambda: graphs.counts.padding_tokens,
        _start([encoder]),
    )


def _side_of_replicas(
    name: str, load: Callable[[torch.device], VisionEncoder], devices: Mapping[str, torch.device]
) -> Side:
    """A side that computes one vector for each image and divides the images of a batch among the devices."""
    group = ReplicaGroup([Replica(name, partial(load, device)) for name, device in devices.items()])
    encoders = [replica.ready.result() for replica in group.replicas]
    vector = OutputSpec(pooled=True, normalize=True, deepstack=False, dtype=torch.float32)

    def submit(batch: Sequence[Patches]) -> Future[BatchResult]:
        return group.submit([EncodeItem(patches, vector) for patches in batch])

    return Side(
        name,
        encoders[0].attn_backend,
        encode=lambda batch: submit(batch).result(),
        wait=lambda: None,  # `encode` waits
        padding=lambda: sum(encoder.graphs.counts.padding_tokens for encoder in encoders),
        start=_start(encoders),
        submit=submit,
        num_devices=len(encoders),
        close=group.close,
    )


def _start(encoders: Sequence[VisionEncoder]) -> Start:
    """The longest capture and the largest memory of all encoders."""
    graphs = [encoder.graphs for encoder in encoders]
    return Start(
        len(graphs[0].graphs),
        max(each.capture_seconds for each in graphs),
        max(each.memory_bytes for each in graphs),
    )


class Reference:
    """The vision model of transformers with the weights of a checkpoint."""

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
        """Encodes a batch. Normalizes on the device: the processor of transformers would copy more bytes."""
        pixels = torch.cat([image.pixels for image in images]).to(self._device, self._dtype)
        pixels = (pixels / 255 - self._mean) / self._std
        still = pixels.unflatten(1, (self._channels, 1, -1)).expand(-1, -1, self._frames, -1)
        grids = torch.tensor([image.grid_thw for image in images], device=self._device)
        with torch.inference_mode():
            return self._model(still.flatten(1), grids)

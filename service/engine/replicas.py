"""Starts the replicas that the settings ask for: on which devices, and with which CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from models import CudaGraphSettings, ModelError, Replica, ReplicaGroup, VisionEncoder, replica_devices
from service.answers.dtypes import TORCH_DTYPES
from service.config.settings import Settings


def load_replicas(settings: Settings) -> ReplicaGroup:
    """Starts the replicas of the model that the settings name. Each loads in a thread of its own.

    Raises `ModelError` if a device that the settings ask for is not there.
    """
    devices = replica_devices(settings.device, settings.data_parallel_size)
    use_cores_for_requests(devices.values())
    return ReplicaGroup([_replica(settings, name, device) for name, device in devices.items()])


def load_replica(settings: Settings, name: str) -> Replica:
    """Starts only the replica called `name`. Raises `ModelError` as `load_replicas` does."""
    device = replica_devices(settings.device, settings.data_parallel_size)[name]
    use_cores_for_requests([device])
    return _replica(settings, name, device)


def _replica(settings: Settings, name: str, device: torch.device) -> Replica:
    load = partial(
        VisionEncoder.from_pretrained,
        settings.model,
        dtype=None if settings.dtype == "auto" else TORCH_DTYPES[settings.dtype],
        revision=settings.revision,
        attn_backend=settings.mm_encoder_attn_backend,
        min_pixels=settings.min_pixels,
        max_pixels=settings.max_pixels,
        device=device,
        cuda_graphs=graph_settings(settings, device),
    )
    return Replica(name, load)


def use_cores_for_requests(devices: Iterable[torch.device]) -> None:
    """With GPUs only, torch's calls on the CPU are short copies, which are slower with several threads."""
    if all(device.type == "cuda" for device in devices):
        torch.set_num_threads(1)


def graph_settings(settings: Settings, device: torch.device) -> CudaGraphSettings | None:
    """How to capture CUDA graphs on a device. None: run eagerly.

    Raises `ModelError` if the settings ask for graphs and the device has none.
    """
    if device.type != "cuda":
        if settings.asks_for_graphs:
            raise ModelError(f"{settings.asks_for_graphs} needs CUDA graphs, and no CUDA device is here")
        return None
    if settings.cudagraph_mm_encoder is False:
        return None
    return CudaGraphSettings(
        token_budgets=settings.encoder_cudagraph_token_budgets,
        budget_steps=settings.encoder_cudagraph_budget_steps,
        max_images_per_batch=settings.encoder_cudagraph_max_images_per_batch,
        required=settings.asks_for_graphs is not None,
    )

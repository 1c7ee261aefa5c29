"""Finds devices by the names that settings and metrics use."""

from __future__ import annotations

import torch

from models.errors import ModelError


def find_device(device: str | torch.device) -> torch.device:
    """Returns the device of that name. `auto` is the first GPU, else the CPU. Raises `ModelError`."""
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        where = torch.device(device)
    except RuntimeError:
        raise ModelError(f"device {device!r} is not one of auto, cpu, cuda, cuda:N") from None
    if where.type == "cpu":
        return where
    if where.type != "cuda":
        raise ModelError(f"device {device!r} is not one of auto, cpu, cuda, cuda:N")
    count = torch.cuda.device_count()
    if (where.index or 0) >= count:
        raise ModelError(f"device {device!r} is not here: this process sees {count} CUDA devices")
    return torch.device("cuda", where.index or 0)


def replica_devices(device: str, num_replicas: int) -> dict[str, torch.device]:
    """Returns the device of each replica, by the replica's name. Raises `ModelError` if there are too few."""
    return spread(find_device(device), num_replicas, torch.cuda.device_count())


def spread(first: torch.device, num_replicas: int, num_gpus: int) -> dict[str, torch.device]:
    """Returns `first` for one replica, else GPUs from 0 on, or the CPU for all under numbered names."""
    if num_replicas == 1:
        return {str(first): first}
    if first.type == "cpu":
        return {f"cpu:{index}": first for index in range(num_replicas)}
    if num_replicas > num_gpus:
        raise ModelError(
            f"data_parallel_size {num_replicas} needs as many CUDA devices, and this process sees {num_gpus}"
        )
    return {f"cuda:{index}": torch.device("cuda", index) for index in range(num_replicas)}

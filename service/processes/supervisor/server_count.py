"""The number of API servers that fits a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from models import ModelError, replica_devices
from service.config.settings import Settings

_SERVERS_PER_GPU = 4
_THREADS_PER_SERVER = 4


def count_servers(
    settings: Settings, find_devices: Callable[[str, int], Mapping[str, torch.device]] = replica_devices
) -> int:
    """Returns the number of API servers, each a process beside those of the devices.

    0: a single process does everything.
    """
    try:
        devices = find_devices(settings.device, settings.data_parallel_size)
    except ModelError:
        devices = {}  # loading the model reports it
    num_gpus = sum(device.type == "cuda" for device in devices.values())
    automatic = min(_SERVERS_PER_GPU * num_gpus, settings.decode_threads // _THREADS_PER_SERVER)
    count = settings.api_server_count or max(1, automatic)
    # Several GPUs never share a process: a GPU that fails would take the others with it.
    return count if count > 1 or num_gpus > 1 else 0

"""The process of a GPU that fails for good, as after a bad kernel, when it gets a certain image."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import torch

from models import CudaGraphSettings, EncodeItem, Replica, VisionEncoder, replica_devices
from models.readback import RunningBatch
from service.config.settings import Settings
from service.processes.device import device_process as device

BAD_LEVEL = 251


def load_replica(settings: Settings, name: str) -> Replica:
    """Loads a replica as the service does, with an encoder that can fail."""
    where = replica_devices(settings.device, settings.data_parallel_size)[name]
    return Replica(name, partial(_load, where))


def _load(where: torch.device) -> VisionEncoder:
    encoder = VisionEncoder.from_pretrained("demo", device=where, cuda_graphs=CudaGraphSettings())
    launch = encoder.launch

    def launch_or_fail(items: Sequence[EncodeItem]) -> RunningBatch:
        if any(int(item.patches.pixels[0, 0]) == BAD_LEVEL for item in items):
            with encoder.stream:  # an index out of range
                torch.zeros(8, device=where)[torch.full((8,), 10**6, device=where)]
        return launch(items)

    encoder.launch = launch_or_fail  # type: ignore[method-assign]
    return encoder


def main(file: int) -> NoReturn:
    """Replaces the main function of a device's process."""
    device.main(file, load_replica)

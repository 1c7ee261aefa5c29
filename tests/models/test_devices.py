from __future__ import annotations

import pytest
import torch

from models import ModelError, replica_devices
from models.devices import find_device, spread

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "mps", "cpu:x"])
def test_missing_device_is_an_error(device: str) -> None:
    with pytest.raises(ModelError, match=f"device '{device}' is not"):
        find_device(device)


@pytest.mark.parametrize(
    ("first", "num_replicas", "expected"),
    [
        (CPU, 1, {"cpu": CPU}),
        (CPU, 3, {"cpu:0": CPU, "cpu:1": CPU, "cpu:2": CPU}),
        (GPU, 1, {"cuda:0": GPU}),
        (torch.device("cuda", 1), 1, {"cuda:1": torch.device("cuda", 1)}),
        (GPU, 2, {"cuda:0": GPU, "cuda:1": torch.device("cuda", 1)}),
    ],
)
def test_replicas_are_named_after_their_device(
    first: torch.device, num_replicas: int, expected: dict[str, torch.device]
) -> None:
    assert spread(first, num_replicas, num_gpus=2) == expected


def test_more_replicas_than_gpus_are_an_error() -> None:
    with pytest.raises(ModelError, match="data_parallel_size 3 needs as many CUDA devices, .* sees 2"):
        spread(GPU, 3, num_gpus=2)


def test_devices_are_found_by_name() -> None:
    assert replica_devices("cpu", 2) == {"cpu:0": CPU, "cpu:1": CPU}

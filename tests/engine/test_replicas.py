from __future__ import annotations

import pytest
import torch

from models import CudaGraphSettings, ModelError
from service.config.settings import Settings
from service.engine.replicas import graph_settings, load_replicas

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_settings_reach_the_encoder_of_each_replica() -> None:
    settings = Settings(
        device="cpu", dtype="bfloat16", data_parallel_size=2, min_pixels=65536, max_pixels=131072
    )
    group = load_replicas(settings)
    encoders = [replica.ready.result(60) for replica in group.replicas]
    group.close()
    assert [replica.name for replica in group.replicas] == ["cpu:0", "cpu:1"]
    assert encoders[0] is not encoders[1]
    for encoder in encoders:
        assert (str(encoder.device), encoder.dtype) == ("cpu", torch.bfloat16)
        config = encoder.preprocessor.config
        assert (config.min_pixels, config.max_pixels) == (65536, 131072)
        assert encoder.graphs.graphs == {}


def test_single_replica_has_the_name_of_its_device() -> None:
    group = load_replicas(Settings(device="cpu"))
    group.close()
    assert [replica.name for replica in group.replicas] == ["cpu"]


def test_missing_device_is_an_error_before_loading() -> None:
    with pytest.raises(ModelError, match="device 'cuda:99' is not here"):
        load_replicas(Settings(device="cuda:99"))


@pytest.mark.parametrize(
    ("settings", "device", "expected"),
    [
        (Settings(), CPU, None),
        (Settings(cudagraph_mm_encoder=False), CPU, None),
        (Settings(cudagraph_mm_encoder=False), GPU, None),
        (Settings(), GPU, CudaGraphSettings(required=False)),
        (Settings(cudagraph_mm_encoder=True), GPU, CudaGraphSettings()),
        (Settings(encoder_cudagraph_budget_steps=2), GPU, CudaGraphSettings(budget_steps=2)),
        (
            Settings(encoder_cudagraph_token_budgets=(64, 128), encoder_cudagraph_max_images_per_batch=3),
            GPU,
            CudaGraphSettings(token_budgets=(64, 128), max_images_per_batch=3),
        ),
    ],
)
def test_graphs_are_captured_only_on_a_gpu(
    settings: Settings, device: torch.device, expected: CudaGraphSettings | None
) -> None:
    assert graph_settings(settings, device) == expected


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        (Settings(cudagraph_mm_encoder=True), "--cudagraph-mm-encoder"),
        (Settings(encoder_cudagraph_token_budgets=(64,)), "--encoder-cudagraph-token-budgets"),
    ],
)
def test_settings_that_need_graphs_are_refused_without_a_gpu(settings: Settings, flag: str) -> None:
    with pytest.raises(ModelError, match=f"{flag} needs CUDA graphs, and no CUDA device is here"):
        graph_settings(settings, CPU)

"""vLLM's connector on a GPU, without vLLM: what a worker loads there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.vllm_connector import (
    WIDTH,
    Chat,
    Feature,
    Role,
    Scheduler,
    connector_module,
    vllm_config,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_tokens", [6, 90_000, 4_000_000])  # one part, two, and more than all buffers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_workers_load_the_same_bits_to_the_gpu(tmp_path: Path, num_tokens: int, dtype: torch.dtype) -> None:
    tokens = torch.randn(num_tokens, WIDTH).to(dtype)
    with connector_module() as module:
        vllm = Scheduler(module, dir=str(tmp_path))
        worker = module.VisionSidecarConnector(vllm_config(dtype=dtype, dir="/"), Role.WORKER)
        for number in range(3):  # the pinned buffers are used again
            uuid = f"vs1-{number:064x}"
            save_file({"tokens": tokens + number}, tmp_path / f"{uuid}.safetensors", {"grid_thw": "[1,4,6]"})
            worker.bind_connector_metadata(vllm.until(Chat(uuid, [Feature(uuid, num_tokens)])))
            cache: dict[str, torch.Tensor] = {}
            worker.start_load_caches(cache)
            assert cache[uuid].is_cuda
            assert torch.equal(cache[uuid].cpu(), tokens + number)
        worker.shutdown()
        vllm.connector.shutdown()

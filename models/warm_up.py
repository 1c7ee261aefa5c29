"""Eager runs at start: kernels are compiled before the first request, and a broken compiler stops the start.

Knows the protocol of encoders, and no encoder.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

import torch

from models.budgets import infer_warm_up
from models.cudagraph_protocol import BatchT, SupportsEncoderCudaGraph

logger = logging.getLogger(__name__)

# Devices compile and capture one after the other: compilers, captures and caches belong to the process.
START_LOCK = threading.Lock()


def compile_kernels(model: SupportsEncoderCudaGraph[BatchT], device: torch.device, above_tokens: int) -> None:
    """Compiles the kernels for images over `above_tokens` tokens. Only CUDA devices need this."""
    if device.type != "cuda":
        return
    smallest, largest = model.get_encoder_cudagraph_budget_range()
    with START_LOCK:
        warm_up(model, infer_warm_up(smallest, largest, above_tokens))
        torch.cuda.synchronize(device)


def warm_up(model: SupportsEncoderCudaGraph[BatchT], sizes: Iterable[int]) -> None:
    """Runs one image of each size, in tokens and ascending, until memory runs out."""
    for tokens in sizes:
        images = model.prepare_encoder_cudagraph_capture_inputs(tokens, 1)
        try:
            model.encoder_eager_forward(images)
        except torch.OutOfMemoryError:
            logger.warning("no memory to run an image of %d tokens eagerly: such requests will fail", tokens)
            return

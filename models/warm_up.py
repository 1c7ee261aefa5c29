"""Eager runs at the start, so that no request waits for a compiler or finds out that it fails.

Knows the protocol of encoders, and no encoder.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from models.protocol import Batch, SupportsEncoderCudaGraph

logger = logging.getLogger(__name__)


def warm_up(model: SupportsEncoderCudaGraph[Batch], sizes: Iterable[int]) -> None:
    """Runs one image of each size, in tokens, the smallest first, as far as memory allows."""
    for tokens in sizes:
        images = model.prepare_encoder_cudagraph_capture_inputs(tokens, 1)
        try:
            model.encoder_eager_forward(images)
        except torch.OutOfMemoryError:
            logger.warning("no memory to run an image of %d tokens eagerly: such requests will fail", tokens)
            return

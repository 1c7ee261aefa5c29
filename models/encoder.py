"""`VisionEncoder`: a checkpoint on one device, synchronous.

Takes patches and says, for each image, what to return; knows nothing of requests, queues or threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from models.attention import select_attention
from models.demo import DEMO, demo_checkpoint
from models.errors import ModelError
from models.outputs import BatchResult, BatchStats, EncodeItem, OutputSpec
from models.preprocess import Patches, Preprocessor
from models.qwen3_vl import (
    PATCH_BIAS,
    PATCH_WEIGHT,
    VisionTransformer,
    checkpoint_shapes,
    fold_patch_embedding,
)
from models.weights import Checkpoint, check_tensors, fingerprint, open_checkpoint

logger = logging.getLogger(__name__)


class VisionEncoder:
    """Encodes images on one device. Not thread-safe: one thread owns it."""

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype | None, attn_backend: str
    ) -> None:
        vision = checkpoint.vision
        self.device = device
        self.dtype = dtype or _automatic_dtype(checkpoint, device)
        self.attn_backend, attention = select_attention(attn_backend, device, self.dtype, vision.head_dim)
        self.revision = checkpoint.revision
        self.preprocessor = Preprocessor(checkpoint.preprocess)
        self.hidden_size = vision.out_hidden_size
        self.width = vision.width
        self.num_deepstack = len(vision.deepstack_visual_indexes)
        self._patch_dim = vision.patch_dim
        with torch.device("meta"):
            self.model = VisionTransformer(vision, attention)
        check_tensors(checkpoint.tensors, checkpoint_shapes(vision))
        self.fingerprint = fingerprint(checkpoint)
        _load(self.model, checkpoint, device, self.dtype)

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        *,
        device: str | torch.device = "auto",
        dtype: torch.dtype | None = None,
        revision: str | None = None,
        attn_backend: str = "auto",
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> VisionEncoder:
        """Loads `demo`, a local folder or a hub repository.

        `dtype` None: float32 on a CPU; on a GPU float16 for a float16 checkpoint, else bfloat16. The pixel
        limits replace the checkpoint's. Raises `ModelError`, in one clear line, for all that cannot be used.
        """
        where = _device(device)
        started = time.perf_counter()
        if model == DEMO:
            checkpoint = demo_checkpoint()
        else:
            checkpoint = open_checkpoint(model, revision)
        checkpoint = _with_limits(checkpoint, min_pixels, max_pixels)
        encoder = cls(checkpoint, where, dtype, attn_backend)
        logger.info(
            "loaded %s on %s in %.1f s: %s, attention by %s",
            model,
            where,
            time.perf_counter() - started,
            encoder.dtype,
            encoder.attn_backend,
        )
        return encoder

    def preprocess(self, rgb: npt.NDArray[np.uint8]) -> Patches:
        """Patches of a uint8 array [height, width, 3]. Raises `AspectRatioError`."""
        return self.preprocessor(rgb)

    def encode(self, images: Sequence[Patches]) -> list[torch.Tensor]:
        """All tokens of each image: [num_tokens, width] on the encoder's device, in its dtype."""
        if not images:
            return []
        with torch.inference_mode():
            return list(self._forward(images).split([image.num_tokens for image in images]))

    def run(self, items: Sequence[EncodeItem]) -> BatchResult:
        """Encodes a batch and brings what was asked for to the host."""
        started = time.perf_counter()
        with torch.inference_mode():
            tokens = self.encode([item.patches for item in items])
            selected = [self._select(rows, item.output) for rows, item in zip(tokens, items, strict=True)]
            embeddings = tuple(rows.cpu() for rows in selected)
        finished = time.perf_counter()
        stats = BatchStats(
            num_images=len(items),
            num_tokens=sum(item.patches.num_tokens for item in items),
            hits=0,
            misses={"disabled": len(items)},
            busy_s=finished - started,
        )
        return BatchResult(embeddings, stats, started, finished)

    def _forward(self, images: Sequence[Patches]) -> torch.Tensor:
        pixels = torch.cat([self._checked(image) for image in images]).to(self.device)
        grids = torch.tensor([image.grid_thw[1:] for image in images], dtype=torch.int32, device=self.device)
        tokens: torch.Tensor = self.model(pixels, grids, tuple(len(image.pixels) for image in images))
        return tokens

    def _checked(self, image: Patches) -> torch.Tensor:
        t, h, w = image.grid_thw
        merge = self.preprocessor.config.merge_size
        if t != 1 or h % merge or w % merge or image.num_tokens * merge**2 != t * h * w:
            raise ValueError(f"grid {image.grid_thw} is not of a still image of this model")
        if image.pixels.shape != (h * w, self._patch_dim) or image.pixels.dtype != torch.uint8:
            raise ValueError(f"patches are not uint8 [{h * w}, {self._patch_dim}], which their grid says")
        return image.pixels

    def _select(self, tokens: torch.Tensor, output: OutputSpec) -> torch.Tensor:
        dtype = output.dtype or self.dtype
        if output.pooled:
            vector = tokens[:, : self.hidden_size].mean(dim=0, dtype=torch.float32)
            return (F.normalize(vector, dim=0) if output.normalize else vector).to(dtype)
        return (tokens if output.deepstack else tokens[:, : self.hidden_size]).to(dtype)


def _load(model: VisionTransformer, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
    """Fills the model one tensor at a time, so that little more than the weights themselves is ever held."""
    get = checkpoint.tensors.get
    preprocess = checkpoint.preprocess
    folded_weight, folded_bias = fold_patch_embedding(
        get(PATCH_WEIGHT),
        get(PATCH_BIAS),
        mean=preprocess.mean,
        std=preprocess.std,
        rescale_factor=preprocess.rescale_factor,
    )
    folded = {PATCH_WEIGHT: folded_weight, PATCH_BIAS: folded_bias}
    state = {}
    for name, meta in model.state_dict().items():
        source = folded[name] if name in folded else get(name)
        state[name] = torch.empty(meta.shape, dtype=dtype, device=device).copy_(source)
    model.load_state_dict(state, assign=True)
    model.to(device).eval().requires_grad_(False)


def _automatic_dtype(checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    stored = checkpoint.tensors.get(PATCH_BIAS).dtype
    return torch.float16 if stored == torch.float16 else torch.bfloat16


def _device(device: str | torch.device) -> torch.device:
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


def _with_limits(checkpoint: Checkpoint, min_pixels: int | None, max_pixels: int | None) -> Checkpoint:
    old = checkpoint.preprocess
    new = replace(old, min_pixels=min_pixels or old.min_pixels, max_pixels=max_pixels or old.max_pixels)
    if new.min_pixels > new.max_pixels:
        raise ModelError(f"min_pixels {new.min_pixels} is over max_pixels {new.max_pixels}")
    return replace(checkpoint, preprocess=new)

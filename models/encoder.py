"""`VisionEncoder`: a checkpoint on one device. Turns patches into embeddings.

Knows nothing of requests, queues or threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from models.attention import select_attention
from models.config import VisionConfig
from models.cudagraph import CudaGraphSettings, EncoderCudaGraphManager
from models.demo import DEMO, demo_checkpoint
from models.devices import find_device
from models.errors import ModelError
from models.kernels import select_kernels
from models.outputs import BatchResult, EncodeItem
from models.preprocess import Patches, Preprocessor
from models.qwen3_vl import (
    PATCH_BIAS,
    PATCH_WEIGHT,
    VisionTransformer,
    checkpoint_shapes,
    fold_patch_embedding,
)
from models.qwen3_vl_adapter import Qwen3VLAdapter
from models.readback import RunningBatch, select_outputs, warm_up_outputs
from models.streams import DeviceStream
from models.token_sinks import TokenWriting, allocate
from models.weights import Checkpoint, check_tensors, fingerprint, open_checkpoint

logger = logging.getLogger(__name__)


class VisionEncoder:
    """Encodes images on one device. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        *,
        dtype: torch.dtype | None = None,
        attn_backend: str = "auto",
        cuda_graphs: CudaGraphSettings | None = None,
        fused_kernels: bool = True,
    ) -> None:
        vision = _padded(checkpoint.vision)
        self.device = device
        self.dtype = dtype or _automatic_dtype(checkpoint, device)
        backend = select_attention(attn_backend, device, self.dtype, vision.head_dim)
        if cuda_graphs is not None and device.type == "cuda" and not backend.in_graphs:
            if cuda_graphs.required:
                raise ModelError(f"a CUDA graph cannot hold attention backend {backend.name}")
            logger.info("no CUDA graphs: they cannot hold attention backend %s", backend.name)
            cuda_graphs = None
        self.attn_backend = backend.name
        self.revision = checkpoint.revision
        self.preprocessor = Preprocessor(checkpoint.preprocess)
        self.hidden_size = vision.out_hidden_size
        self.width = vision.width
        self.num_deepstack = len(vision.deepstack_visual_indexes)
        self._patch_dim = vision.patch_dim
        check_tensors(checkpoint.tensors, checkpoint_shapes(checkpoint.vision))
        self.fingerprint = fingerprint(checkpoint)
        self.stream = DeviceStream(device)
        with torch.inference_mode(), self.stream:
            self.kernels = select_kernels(device, self.dtype, fused=fused_kernels)
            with torch.device("meta"):
                self.model = VisionTransformer(vision, backend.attention, self.kernels)
            _load(self.model, checkpoint, device, self.dtype)
            packed = Qwen3VLAdapter(self.model, checkpoint.preprocess)
            self.graphs = EncoderCudaGraphManager(packed, cuda_graphs, device)
            warm_up_outputs(self.kernels, self.hidden_size, device, self.dtype)

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
        cuda_graphs: CudaGraphSettings | None = None,
        fused_kernels: bool = True,
    ) -> VisionEncoder:
        """Loads `demo`, a local folder or a hub repository.

        If `dtype` is None, it is float32 on a CPU, and on a GPU float16 for a float16 checkpoint, else
        bfloat16. The pixel limits replace those of the checkpoint. Without `cuda_graphs` every image runs
        eagerly. Raises `ModelError` with one clear line if the checkpoint, the device or an option cannot be
        used.
        """
        where = find_device(device)
        started = time.perf_counter()
        checkpoint = demo_checkpoint() if model == DEMO else open_checkpoint(model, revision)
        checkpoint = _with_limits(checkpoint, min_pixels, max_pixels)
        encoder = cls(
            checkpoint,
            where,
            dtype=dtype,
            attn_backend=attn_backend,
            cuda_graphs=cuda_graphs,
            fused_kernels=fused_kernels,
        )
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
        """Turns a uint8 array [height, width, 3] into patches, in pinned memory for a GPU.

        `preprocessor` does the same in ordinary memory. Raises `AspectRatioError`.
        """
        return self.preprocessor(rgb, pin_memory=self.device.type == "cuda")

    def encode(self, images: Sequence[Patches]) -> list[torch.Tensor]:
        """Returns all tokens of each image: [num_tokens, width] on the encoder's device, in its dtype.

        Returns before a GPU has finished, but after it has read the patches. Images of a sub-batch share one
        storage: clone before `torch.save`. Raises `ValueError` for patches that do not fit this model, and
        errors of the device.
        """
        results: dict[int, torch.Tensor] = {}
        storages: list[torch.Tensor] = []

        def keep(indices: Sequence[int], tokens: torch.Tensor) -> None:
            with torch.inference_mode(False), torch.no_grad():  # callers get ordinary tensors
                rows = torch.cat(tuple(tokens), dim=1)  # [tokens, width], a copy
            storages.append(rows)
            lengths = [images[index].num_tokens for index in indices]
            results.update(zip(indices, rows.split(lengths), strict=True))

        with torch.inference_mode(), self.stream:
            self.graphs.run(self._checked(images), keep)
        self.stream.hand_over(storages)
        return [results[index] for index in range(len(images))]

    def launch(self, items: Sequence[EncodeItem]) -> RunningBatch:
        """Starts a batch and returns before the device has finished it.

        Reads patches and raises errors as `encode` does.
        """
        images = self._checked([item.patches for item in items])
        running = RunningBatch(len(items), self.stream, self._open_sinks(items))

        def select(indices: Sequence[int], tokens: torch.Tensor) -> None:
            for group in select_outputs(tokens, indices, items, self.kernels, self.dtype):
                running.read_back(group)

        try:
            with torch.inference_mode(), self.stream:
                counts = self.graphs.run(images, select, running.begin)
                running.launched(counts, num_tokens=sum(image.num_tokens for image in images))
        except BaseException:
            running.discard()
            raise
        return running

    def _open_sinks(self, items: Sequence[EncodeItem]) -> dict[int, TokenWriting]:
        """Opens the sinks of a batch. Their memory is allocated while the device encodes."""
        writings: dict[int, TokenWriting] = {}
        try:
            for index, item in enumerate(items):
                if item.sink is not None:
                    width = self.width if item.output.deepstack else self.hidden_size
                    shape = item.patches.num_tokens, width
                    writings[index] = item.sink.open(shape, item.output.dtype or self.dtype)
        except BaseException:
            for writing in writings.values():
                writing.discard()
            raise
        allocate(writings.values(), alone=len(items) == 1)
        return writings

    def run(self, items: Sequence[EncodeItem]) -> BatchResult:
        """Encodes a batch and returns the requested outputs on the host. Raises the errors of `encode`."""
        return self.launch(items).wait()

    def check_device(self) -> None:
        """Raises `torch.AcceleratorError` if a fault has left the device unusable."""
        self.stream.check_device()

    def _checked(self, images: Sequence[Patches]) -> Sequence[Patches]:
        merge = self.preprocessor.config.merge_size
        for image in images:
            t, h, w = image.grid_thw
            if t != 1 or h % merge or w % merge or image.num_tokens * merge**2 != t * h * w:
                raise ValueError(f"grid {image.grid_thw} is not of a still image of this model")
            pixels = image.pixels
            if pixels.shape != (h * w, self._patch_dim) or pixels.dtype != torch.uint8 or not pixels.is_cpu:
                raise ValueError(
                    f"patches are not uint8 [{h * w}, {self._patch_dim}] on the host, as their grid says"
                )
        return images


def _padded(config: VisionConfig) -> VisionConfig:
    """Widens the MLP to whole cache lines, because products run faster then. The new columns are zeros."""
    return replace(config, intermediate_size=-(-config.intermediate_size // 64) * 64)


def _load(model: VisionTransformer, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
    """Fills the model one tensor at a time, so that the peak of memory is little more than the weights."""
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
        target = torch.zeros(meta.shape, dtype=dtype, device=device)
        target[tuple(slice(size) for size in source.shape)].copy_(source)
        state[name] = target
    model.load_state_dict(state, assign=True)
    model.to(device).eval().requires_grad_(False)
    if model.kernels.defers_biases:
        model.defer_biases()


def _automatic_dtype(checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    stored = checkpoint.tensors.get(PATCH_BIAS).dtype
    return torch.float16 if stored == torch.float16 else torch.bfloat16


def _with_limits(checkpoint: Checkpoint, min_pixels: int | None, max_pixels: int | None) -> Checkpoint:
    old = checkpoint.preprocess
    new = replace(old, min_pixels=min_pixels or old.min_pixels, max_pixels=max_pixels or old.max_pixels)
    if new.min_pixels > new.max_pixels:
        raise ModelError(f"min_pixels {new.min_pixels} is over max_pixels {new.max_pixels}")
    return replace(checkpoint, preprocess=new)

"""The output that a caller requests for each image, and the results of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from models.preprocess import Patches
from models.token_sinks import TokenSink


@dataclass(frozen=True)
class OutputSpec:
    """The output for one image. It is computed on the encoder's device."""

    pooled: bool = False  # one vector, the float32 mean of the main columns; else all tokens
    normalize: bool = False  # divide by the L2 norm; with `pooled` only
    deepstack: bool = True  # append the deepstack columns; without `pooled` only
    dtype: torch.dtype | None = None  # of the result; None: the encoder's own

    def __post_init__(self) -> None:
        assert self.pooled or not self.normalize, "only pooled vectors are normalized"
        assert not (self.pooled and self.deepstack), "pooling covers the main columns only"


@dataclass(frozen=True, eq=False)
class EncodeItem:
    """One image and the output requested for it.

    With a `sink`, which takes all tokens, the result is a single number: the largest magnitude of the tokens.
    It is not finite if one of them is not; then nothing is written.
    """

    patches: Patches
    output: OutputSpec
    sink: TokenSink | None = None

    def __post_init__(self) -> None:
        assert self.sink is None or not self.output.pooled, "a sink takes tokens"


@dataclass(frozen=True)
class BatchStats:
    """Statistics of one batch on one device, for the metrics."""

    device: str
    num_images: int
    num_tokens: int
    hits: int  # images run by graph replay
    misses: Mapping[str, int]  # images run eagerly, by reason: oversize, disabled, error
    replays: Mapping[int, int]  # by token budget
    padding_tokens: int  # computed and not used
    busy_s: float  # time the device worked, in seconds


@dataclass(frozen=True, eq=False)
class BatchResult:
    """The embeddings of one batch, in its order and on the host."""

    # [hidden] if pooled, else [tokens, width] in its own storage; [1] for an image with a sink
    embeddings: tuple[torch.Tensor, ...]
    stats: tuple[BatchStats, ...]  # one for each device that ran images
    started_at: float  # time.perf_counter() when the launch began
    finished_at: float  # time.perf_counter() when the results were on the host

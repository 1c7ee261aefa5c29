"""What the service knows of replicas and of their encoder, be they in this process or in another."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from models import Preprocessor
from service.queue.batcher import DeviceQueue


class HasGraphs(Protocol):
    """What is said of an encoder's CUDA graphs."""

    @property
    def graphs(self) -> Collection[int]: ...

    @property
    def max_images(self) -> int: ...

    @property
    def memory_bytes(self) -> int: ...

    @property
    def capture_seconds(self) -> float: ...


class LoadedEncoder(Protocol):
    """What the service knows of an encoder: a `VisionEncoder`, or the facts of one in another process."""

    @property
    def revision(self) -> str | None: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def attn_backend(self) -> str: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def num_deepstack(self) -> int: ...

    @property
    def preprocessor(self) -> Preprocessor: ...

    @property
    def graphs(self) -> HasGraphs: ...


class ServingReplica(Protocol):
    """A `Replica`, or what stands for one of another process."""

    @property
    def name(self) -> str: ...

    @property
    def ready(self) -> Future[Any]: ...  # of a `LoadedEncoder`

    def serve(self, queue: DeviceQueue) -> Future[None]: ...

    def close(self) -> None: ...


class HasReplicas(Protocol):
    """All replicas that load the same model."""

    @property
    def replicas(self) -> Sequence[ServingReplica]: ...

"""The interfaces of replicas and of their encoder, which may be in this process or in another."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from models import Preprocessor
from service.queue.batcher import DeviceQueue


class HasGraphs(Protocol):
    """The facts about an encoder's CUDA graphs. `graphs` holds the captured budgets, in tokens."""

    @property
    def graphs(self) -> Collection[int]: ...

    @property
    def max_images(self) -> int: ...

    @property
    def memory_bytes(self) -> int: ...

    @property
    def capture_seconds(self) -> float: ...


class LoadedEncoder(Protocol):
    """The facts about an encoder: a `VisionEncoder`, or what another process says of its own."""

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
    """A `Replica`, or a stand-in for the replica in another process."""

    @property
    def name(self) -> str: ...

    @property
    def ready(self) -> Future[Any]: ...  # of a `LoadedEncoder`

    def serve(self, queue: DeviceQueue) -> Future[None]: ...

    def close(self) -> None: ...


class HasReplicas(Protocol):
    """All replicas of one model."""

    @property
    def replicas(self) -> Sequence[ServingReplica]: ...

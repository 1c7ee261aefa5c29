"""A fake encoder with known answers, images to send, and the app around both."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import numpy as np
import torch
from fastapi import FastAPI
from PIL import Image
from prometheus_client import CollectorRegistry

from models import (
    BatchResult,
    BatchStats,
    EncodeItem,
    OutputSpec,
    Patches,
    PreprocessConfig,
    Preprocessor,
    Replica,
    ReplicaGroup,
    write_tokens,
)
from service.config.settings import Settings
from service.engine.engine import Engine, State

CONFIG = PreprocessConfig(
    patch_size=16,
    temporal_patch_size=2,
    merge_size=2,
    min_pixels=32 * 32,
    max_pixels=1024 * 1024,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    rescale_factor=1 / 255,
)


HIDDEN_SIZE = 4
NUM_DEEPSTACK = 2
FINGERPRINT = "f" * 64


@dataclass
class FakeGraphs:
    """Stands in for `EncoderCudaGraphManager`: its facts only."""

    graphs: Mapping[int, object] = field(default_factory=dict)  # by budget
    max_images: int = 16
    memory_bytes: int = 0
    capture_seconds: float = 0.0


class FakeRunning:
    """A batch that was launched. Waiting for it calls `finish`."""

    def __init__(self, finish: Callable[[], BatchResult]) -> None:
        self._finish = finish

    def wait(self) -> BatchResult:
        self.wait_for_device()
        return self.collect()

    def wait_for_device(self) -> None:
        self._result = self._finish()

    def collect(self) -> BatchResult:
        return self._result


class FakeEncoder:
    """Stands in for `VisionEncoder`: a token's column c is the mean of its pixels times (c + 1).

    With graphs every batch is one replay of the smallest budget. `fail` runs where the device's errors show.
    """

    def __init__(
        self,
        fail: Callable[[Sequence[EncodeItem]], None] = lambda items: None,
        graphs: FakeGraphs | None = None,
    ) -> None:
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.attn_backend = "FAKE"
        self.fingerprint = FINGERPRINT
        self.revision = "abc123"
        self.preprocessor = Preprocessor(CONFIG)
        self.hidden_size = HIDDEN_SIZE
        self.width = HIDDEN_SIZE * (1 + NUM_DEEPSTACK)
        self.num_deepstack = NUM_DEEPSTACK
        self.graphs = graphs or FakeGraphs()
        self.batches: list[list[EncodeItem]] = []
        self._fail = fail

    def check_device(self) -> None:
        """The device is healthy."""

    def launch(self, items: Sequence[EncodeItem]) -> FakeRunning:
        started = time.perf_counter()
        self.batches.append(list(items))
        return FakeRunning(partial(self._finish, items, started))

    def _finish(self, items: Sequence[EncodeItem], started: float) -> BatchResult:
        self._fail(items)
        embeddings = tuple(_result(item) for item in items)
        return BatchResult(embeddings, (self._stats(items),), started, time.perf_counter())

    def _stats(self, items: Sequence[EncodeItem]) -> BatchStats:
        num_tokens = sum(item.patches.num_tokens for item in items)
        budget = min(self.graphs.graphs, default=None)
        return BatchStats(
            device=str(self.device),
            num_images=len(items),
            num_tokens=num_tokens,
            hits=0 if budget is None else len(items),
            misses={"disabled": len(items)} if budget is None else {},
            replays={} if budget is None else {budget: 1},
            padding_tokens=0 if budget is None else budget - num_tokens,
            busy_s=0.25,
        )


def fake_replicas(
    *encoders: FakeEncoder, load: Callable[[], object] = lambda: None, name: str = "fake"
) -> ReplicaGroup:
    """Replicas with these encoders. `load` runs in the thread of each replica before it is loaded."""

    def load_fake(encoder: FakeEncoder) -> Any:
        load()
        return encoder

    names = [name] if len(encoders) == 1 else [f"{name}:{index}" for index in range(len(encoders))]
    return ReplicaGroup(
        [Replica(name, partial(load_fake, encoder)) for name, encoder in zip(names, encoders, strict=True)]
    )


def known_embedding(patches: Patches, output: OutputSpec) -> torch.Tensor:
    """The embedding that the fake encoder has for one image."""
    means = patches.pixels.reshape(patches.num_tokens, -1).float().mean(dim=1)  # [tokens]
    columns = torch.arange(1, HIDDEN_SIZE * (1 + NUM_DEEPSTACK) + 1)
    tokens = means[:, None] * columns  # [tokens, width]
    rows = tokens if output.deepstack else tokens[:, :HIDDEN_SIZE]
    if output.pooled:
        rows = rows.mean(dim=0)
        rows = rows / rows.norm() if output.normalize else rows
    return rows.to(output.dtype or torch.float32)


def _result(item: EncodeItem) -> torch.Tensor:
    """The embedding, or the largest magnitude of the tokens if a sink took them."""
    embedding = known_embedding(item.patches, item.output)
    if item.sink is None:
        return embedding
    height, width = embedding.shape
    writing = item.sink.open((height, width), embedding.dtype)
    try:
        if embedding.isfinite().all():
            write_tokens([(writing, embedding)])
    finally:
        writing.discard()
    return embedding.abs().max().reshape(1)


def encode_image(height: int = 64, width: int = 96, *, format: str = "PNG", seed: int = 0) -> bytes:
    """The bytes of an image file of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


class Service:
    """The app under test and its parts. Its event loop runs only while a request does."""

    def __init__(self, app: FastAPI, registry: CollectorRegistry, *encoders: FakeEncoder) -> None:
        self.app = app
        self.engine: Engine = app.state.engine
        self.registry = registry
        self.encoders = encoders
        self.runner = asyncio.Runner()
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sidecar")
        self._lifespan = app.router.lifespan_context(app)

    @property
    def encoder(self) -> FakeEncoder:
        [encoder] = self.encoders
        return encoder

    def start(self) -> None:
        self.runner.run(self._lifespan.__aenter__())

    def stop(self) -> None:
        self.runner.run(self._lifespan.__aexit__(None, None, None))
        self.runner.close()

    def request(self, method: str, url: str, **arguments: Any) -> httpx.Response:
        return self.runner.run(self._client.request(method, url, **arguments))

    def get(self, url: str, **arguments: Any) -> httpx.Response:
        return self.request("GET", url, **arguments)

    def embed(self, image: bytes, query: str = "", **headers: str) -> httpx.Response:
        """Posts one image as it is."""
        headers = {"content-type": "image/png"} | {
            name.replace("_", "-"): text for name, text in headers.items()
        }
        return self.request("POST", f"/embed{query}", content=image, headers=headers)

    def embed_form(self, *images: bytes, query: str = "", **options: str) -> httpx.Response:
        """Posts a form with several images, and with options as parts."""
        files = [("image", (f"{i}.png", image, "image/png")) for i, image in enumerate(images)]
        return self.request("POST", f"/embed{query}", files=files, data=options)

    def wait_for(self, state: State) -> None:
        deadline = time.monotonic() + 10
        while self.engine.state is not state:
            assert time.monotonic() < deadline, f"still {self.engine.state}"
            time.sleep(0.005)

    def metric(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"vision_sidecar_{name}", labels)
        assert value is not None, f"no sample {name} {labels}"
        return value


def only(settings: Settings, **changes: object) -> Settings:
    """A copy of the settings with some changed, validated again."""
    return Settings.model_validate(settings.model_dump(exclude_unset=True) | changes)

"""An embedding does not depend on the other images in its batch: the app with the demo model, on a CPU."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from service.app import create_app
from service.config.settings import Settings
from service.engine.engine import State
from tests.support.traffic import png

SETTINGS = Settings(
    device="cpu", dtype="float32", data_parallel_size=2, decode_threads=2, max_wait_ms=5.0, cache_bytes=0
)


@contextmanager
def running(app: FastAPI, runner: asyncio.Runner) -> Iterator[None]:
    lifespan = app.router.lifespan_context(app)
    runner.run(lifespan.__aenter__())
    deadline = time.monotonic() + 30
    while app.state.engine.state is State.LOADING:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield
    runner.run(lifespan.__aexit__(None, None, None))


@pytest.mark.parametrize("options", ["", "?pooling=none&deepstack=true"])
def test_embedding_does_not_depend_on_its_batch_neighbours(options: str) -> None:
    rng = random.Random(11)
    noise = np.random.default_rng(11)
    images = [
        png(noise.integers(0, 256, (rng.randint(32, 420), rng.randint(32, 420), 3), dtype=np.uint8))
        for _ in range(8)
    ]
    registry = CollectorRegistry()
    app = create_app(SETTINGS, registry=registry)
    transport = httpx.ASGITransport(app)

    async def embed(client: httpx.AsyncClient, chosen: list[int]) -> list[list[float]]:
        files = [("image", ("image", images[index], "image/png")) for index in chosen]
        response = await client.post(f"/embed{options}", files=files)
        assert response.status_code == 200, response.text
        return [entry["embedding"] for entry in response.json()["data"]]

    async def compare() -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://sidecar") as client:
            alone = [(await embed(client, [index]))[0] for index in range(len(images))]
            groups = [rng.choices(range(len(images)), k=rng.choice([1, 1, 2, 5])) for _ in range(40)]
            for found, chosen in zip(
                await asyncio.gather(*(embed(client, chosen) for chosen in groups)), groups, strict=True
            ):
                for embedding, index in zip(found, chosen, strict=True):
                    np.testing.assert_allclose(embedding, alone[index], rtol=0, atol=1e-5)

    with asyncio.Runner() as runner, running(app, runner):
        runner.run(compare())
    num_images = registry.get_sample_value("vision_sidecar_batch_images_sum")
    num_batches = registry.get_sample_value("vision_sidecar_batch_images_count")
    assert num_images is not None
    assert num_batches is not None
    assert num_images > 1.5 * num_batches  # many images shared a batch

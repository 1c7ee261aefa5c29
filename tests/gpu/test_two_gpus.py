"""Two GPUs, each with a replica: the same results as one, in order, and one that fails alone."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection

import httpx
import pytest
import torch
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from models import (
    BatchStats,
    CudaGraphSettings,
    EncodeItem,
    OutputSpec,
    Replica,
    ReplicaGroup,
    VisionEncoder,
    replica_devices,
)
from models.readback import RunningBatch
from models.weights import Checkpoint
from service.app import create_app
from service.engine import State
from service.settings import Settings
from tests.checkpoints import relative_error
from tests.conftest import Service, encode_image
from tests.gpu.images import patches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
VECTOR = OutputSpec(pooled=True, normalize=True, deepstack=False)


@pytest.fixture(scope="module")
def group(checkpoint: Checkpoint) -> Iterator[ReplicaGroup]:
    load = partial(VisionEncoder, checkpoint, dtype=torch.bfloat16, cuda_graphs=CudaGraphSettings())
    devices = replica_devices("cuda", 2)
    group = ReplicaGroup([Replica(name, partial(load, device)) for name, device in devices.items()])
    for replica in group.replicas:
        replica.ready.result()
    yield group
    group.close()


def test_results_are_those_of_one_gpu(group: ReplicaGroup) -> None:
    generator = torch.Generator().manual_seed(7)

    def integer(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    pool = patches(*[(2 * (8 + integer(12)), 2 * (8 + integer(16))) for _ in range(48)])
    counts: Counter[str] = Counter()
    shares: Counter[int] = Counter()
    for _ in range(1000):
        items = [EncodeItem(pool[integer(len(pool))], VECTOR) for _ in range(1 + integer(6))]
        result = group.submit(items).result()
        alone = group.replicas[0].submit(items).result()
        assert len(result.embeddings) == len(items)
        for ours, theirs in zip(result.embeddings, alone.embeddings, strict=True):
            assert relative_error(ours, theirs) < 0.02
        if len(items) == 1:
            assert torch.equal(result.embeddings[0], alone.embeddings[0])
        for stats in result.stats:
            counts.update(_counts(stats))
        assert sum(stats.num_images for stats in result.stats) == len(items)
        shares[len(result.stats)] += 1
    assert shares[1] > 100, "a request of one image leaves the other GPU without a share"
    assert shares[2] > 500
    assert counts["cuda:0"] > 100
    assert counts["cuda:1"] > 100


def _counts(stats: BatchStats) -> dict[str, int]:
    assert stats.num_images == stats.hits, "all of them by replay"
    return {stats.device: stats.num_images}


def test_a_gpu_that_fails_under_load_fails_alone() -> None:
    """In a process of its own: what a lost device leaves behind cannot be cleaned up."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_with_a_failing_gpu, args=(theirs,))
    process.start()
    assert ours.poll(120), "it hangs"
    report = ours.recv()
    process.join(30)
    assert report["up"] == [1, 0], report
    assert set(report["answers"]) == {"200", "device_failed"}, report
    # Before the fault 100 were sent, of which 16 may have been under way, and all later ones are refused.
    assert report["answers"]["200"] >= 84, report
    assert report["worst error"] < 0.02
    assert report["healthz"] == 503
    assert report["queue"] == 0


def serve_with_a_failing_gpu(pipe: Connection) -> None:
    """400 requests to an app on two GPUs, one of which fails on the way. Sends what came of them."""
    poisoned = threading.Event()

    def load(device: torch.device) -> VisionEncoder:
        encoder = VisionEncoder.from_pretrained("demo", device=device, cuda_graphs=CudaGraphSettings())
        launch = encoder.launch

        def launch_or_fail(items: Sequence[EncodeItem]) -> RunningBatch:
            if device.index == 1 and poisoned.is_set():
                with encoder.stream:  # an index behind the end: the device's own fault, for good
                    torch.zeros(8, device=device)[torch.full((8,), 10**6, device=device)]
            return launch(items)

        encoder.launch = launch_or_fail  # type: ignore[method-assign]
        return encoder

    def start_replicas(settings: Settings) -> ReplicaGroup:
        devices = replica_devices("cuda", 2)
        return ReplicaGroup([Replica(name, partial(load, device)) for name, device in devices.items()])

    registry = CollectorRegistry()
    app = create_app(Settings(decode_threads=4), registry=registry, start_replicas=start_replicas)
    service = Service(app, registry)
    service.start()
    deadline = time.monotonic() + 90
    while service.engine.state is State.LOADING and time.monotonic() < deadline:
        time.sleep(0.1)
    pipe.send(service.runner.run(_call(app, service, poisoned)))
    os._exit(0)


async def _call(app: FastAPI, service: Service, poisoned: threading.Event) -> dict[str, object]:
    answers: Counter[str] = Counter()
    errors: list[float] = []
    callers = asyncio.Semaphore(16)
    image = encode_image(336, 336)
    headers = {"content-type": "image/png"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sidecar") as client:
        first = await client.post("/embed", content=image, headers=headers)
        expected = torch.tensor(first.json()["data"][0]["embedding"])

        async def call(number: int) -> None:
            async with callers:
                if number == 100:
                    poisoned.set()
                answer = await client.post("/embed", content=image, headers=headers)
            if answer.status_code == 200:
                answers["200"] += 1
                ours = torch.tensor(answer.json()["data"][0]["embedding"])
                errors.append(relative_error(ours, expected))
            else:
                answers[answer.json()["error"]["code"]] += 1

        await asyncio.gather(*map(call, range(400)))
        health = await client.get("/healthz")
    return {
        "answers": dict(answers),
        "worst error": max(errors),
        "up": [service.metric("device_up", device=device) for device in ("cuda:0", "cuda:1")],
        "healthz": health.status_code,
        "queue": service.metric("queue_images"),
    }

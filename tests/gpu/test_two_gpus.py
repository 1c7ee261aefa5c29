"""Two GPUs, each with a replica: the same results as one, in order, and one that fails alone."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

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


def test_a_gpu_that_fails_under_load_fails_alone(serve: Callable[..., Service]) -> None:
    poisoned = threading.Event()
    loaded: list[VisionEncoder] = []

    def load(device: torch.device) -> VisionEncoder:
        encoder = VisionEncoder.from_pretrained("demo", device=device, cuda_graphs=CudaGraphSettings())
        loaded.append(encoder)
        if device.index == 1:
            launch = encoder.launch

            def fail(items: Sequence[EncodeItem]) -> RunningBatch:
                if poisoned.is_set():
                    with encoder.stream:  # an index behind the end: the device's own fault, for good
                        torch.zeros(8, device=device)[torch.full((8,), 10**6, device=device)]
                return launch(items)

            encoder.launch = fail  # type: ignore[method-assign]
        return encoder

    def start_replicas(settings: Settings) -> ReplicaGroup:
        devices = replica_devices("cuda", 2)
        return ReplicaGroup([Replica(name, partial(load, device)) for name, device in devices.items()])

    service = serve(Settings(decode_threads=4), start_replicas=start_replicas)
    image = encode_image(336, 336)
    expected = service.embed(image).json()["data"][0]["embedding"]
    answers: list[tuple[int, str]] = []

    def call(number: int) -> None:
        if number == 100:
            poisoned.set()
        answer = service.embed(image)
        if answer.status_code == 200:
            ours = torch.tensor(answer.json()["data"][0]["embedding"])
            assert relative_error(ours, torch.tensor(expected)) < 0.02
            answers.append((200, ""))
        else:
            answers.append((answer.status_code, answer.json()["error"]["code"]))

    with ThreadPoolExecutor(16) as callers:
        list(callers.map(call, range(400)))
    counted = Counter(answers)
    assert set(counted) == {(200, ""), (503, "device_failed")}, counted
    assert counted[200, ""] >= 100
    assert service.metric("device_up", device="cuda:0") == 1
    assert service.metric("device_up", device="cuda:1") == 0
    assert service.get("/healthz").status_code == 503
    assert service.metric("queue_images") == 0

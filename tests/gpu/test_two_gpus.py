"""Two GPUs with a replica each give the results of one GPU, and one may fail without the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

import httpx
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
from models.weights import Checkpoint
from service.config.settings import Settings
from service.processes.supervisor.members import DEVICE_PROCESS, Process, spawn
from service.processes.wire.link import Link
from tests.gpu.failing_device import BAD_LEVEL
from tests.gpu.images import patches
from tests.support.checkpoints import relative_error
from tests.support.serving import HeldUpload
from tests.support.supervising import Supervised
from tests.support.traffic import Answer, Scrape
from tests.support.waiting import eventually

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


def test_results_equal_those_of_one_gpu(group: ReplicaGroup) -> None:
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
    assert shares[1] > 100, "only one GPU has a share in a request of one image"
    assert shares[2] > 500
    assert counts["cuda:0"] > 100
    assert counts["cuda:1"] > 100


def _counts(stats: BatchStats) -> dict[str, int]:
    assert stats.num_images == stats.hits, "all images run by replay"
    return {stats.device: stats.num_images}


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # as in test_api_servers_supervisor.py
def test_failed_gpu_does_not_affect_the_other() -> None:
    settings = Settings(device="cuda", data_parallel_size=2, decode_threads=4)

    def spawn_failing_device(module: str, link: Link) -> Process:
        return spawn("tests.gpu.failing_device" if module == DEVICE_PROCESS else module, link)

    server = Supervised(settings, 2, spawn_failing_device)
    level = 100
    answers: list[Answer] = []
    found: list[Scrape] = []

    def scenario() -> None:
        server.wait_until_ready(timeout_s=120)
        first = server.call_later(level).result(60)
        # One upload for each API server, so that the server stays.
        uploads = [HeldUpload(server.port) for _ in range(2)]
        eventually(lambda: server.scrape().total("requests_in_flight") == 3)
        calls = [server.call_later(BAD_LEVEL if number == 100 else level) for number in range(400)]
        answers.extend([first, *(call.result(60) for call in calls)])
        assert [httpx.get(f"{server.url}/healthz").status_code for _ in range(4)] == [503] * 4
        found.append(server.scrape())
        for upload in uploads:
            upload.leave()

    try:
        assert server.run(scenario) == 1
    finally:
        server.close()
    good = [answer.embeddings[0] for answer in answers if answer.status == 200]
    assert {answer.code for answer in answers} == {None, "device_failed"}
    assert answers[101].code == "device_failed", "the request that broke the GPU"
    # 100 requests were sent earlier, of which 15 may have been running. Later requests are refused.
    assert len(good) >= 85
    assert all(relative_error(torch.tensor(ours), torch.tensor(good[0])) < 0.02 for ours in good)
    [scrape] = found
    assert sorted(scrape.total("device_up", f"cuda:{index}") for index in range(2)) == [0, 1]
    assert scrape.total("images_total") == len(good)
    assert scrape.total("queue_images") == 0

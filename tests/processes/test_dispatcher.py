"""Results on their way from a device to several API servers."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from models import OutputSpec
from service.processes.device.dispatcher import place
from service.processes.wire.link import MAX_FILES
from tests.support.app import known_embedding
from tests.support.dispatching import MakeCompany, open_files
from tests.support.processes import DEVICE, CopyingEncoder
from tests.support.queueing import item, value_of
from tests.support.waiting import eventually

MIB = 2**20


TOKENS = OutputSpec(pooled=False, deepstack=False)


DTYPES = (None, torch.float16, torch.bfloat16)


OUTPUTS = [
    *(
        OutputSpec(pooled=True, deepstack=False, dtype=dtype)
        for dtype in (None, torch.float16, torch.bfloat16)
    ),
    OutputSpec(pooled=True, normalize=True, deepstack=False),
    *(OutputSpec(deepstack=False, dtype=dtype) for dtype in DTYPES),
    OutputSpec(deepstack=True),
]


def shared_maps() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:")


# Results


def test_results_of_every_kind_come_back_unchanged(make_dispatch: MakeCompany) -> None:
    company = make_dispatch(max_batch_tokens=1000)
    company.serve(CopyingEncoder())
    server = company.servers[0]
    images = [item(size, size, output) for size in (1, 3, 17) for output in OUTPUTS]
    found = server.outcome(server.put(*images))
    for image, embedding in zip(images, found, strict=True):
        expected = known_embedding(image.patches, image.output)
        assert (embedding.dtype, embedding.shape) == (expected.dtype, expected.shape)
        assert embedding.equal(expected)
    assert sum(stats.num_images for stats in server.observed) == len(images)
    assert {stats.device for stats in server.observed} == {DEVICE}
    assert company.servers[1].observed == []


def test_each_api_server_gets_its_own_results_under_load(make_dispatch: MakeCompany) -> None:
    """The one memory for patches is written by all, and again before results are there."""
    company = make_dispatch(num_servers=3, memory_bytes=16 * 20)
    company.serve(CopyingEncoder())
    rng = random.Random(2)
    sent = []
    for _ in range(150):
        server = rng.choice(company.servers)
        images = [item(rng.randint(1, 10), rng.randrange(256)) for _ in range(rng.randint(1, 4))]
        sent.append((server, images, server.put(*images)))
    for server, images, ticket in sent:
        assert [embedding[0].item() for embedding in server.outcome(ticket)] == [value_of(i) for i in images]
    eventually(lambda: company.idleness.is_idle)
    assert all(server.batcher.is_idle for server in company.servers)


@pytest.mark.parametrize(
    ("sizes", "files"),
    [
        ([], []),
        ([100, MIB - 1, 64], [0, 0, 0]),
        ([MIB - 1, MIB, MIB + 1, 5], [0, 1, 2, 0]),
        ([MIB] * (MAX_FILES + 2), [*range(1, MAX_FILES), 0, 0, 0]),
    ],
    ids=["none", "small", "border", "many"],
)
def test_large_embeddings_have_memory_of_their_own_while_files_are_left(
    sizes: Sequence[int], files: Sequence[int]
) -> None:
    tensors = [torch.empty(0, dtype=torch.uint8).expand(0) if not size else _bytes(size) for size in sizes]
    places, file_sizes = place(tensors)
    assert [there.file for there in places] == files
    assert len(file_sizes) <= MAX_FILES
    ends = [0] * len(file_sizes)
    for there, size in zip(places, sizes, strict=True):
        assert there.offset % 64 == 0
        assert there.offset >= ends[there.file]  # none overlaps another
        ends[there.file] = there.offset + size
    assert all(end <= size for end, size in zip(ends, file_sizes, strict=True))


def _bytes(size: int) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8).expand(size)


def test_large_answer_does_not_keep_the_memory_of_others(make_dispatch: MakeCompany) -> None:
    company = make_dispatch(num_servers=1)
    [server] = company.servers
    ticket = server.put(item(1, 1, TOKENS), item(1, 2, TOKENS), item(1, 3, TOKENS))
    opened, mapped = open_files(), shared_maps()
    company.take().finish(*(torch.full((MIB + extra,), 5, dtype=torch.uint8) for extra in (-1, 0, 1)))
    embeddings = list(server.outcome(ticket))
    assert [len(embedding) for embedding in embeddings] == [MIB - 1, MIB, MIB + 1]
    assert all(bool((embedding == 5).all()) for embedding in embeddings)
    assert len({embedding.untyped_storage().data_ptr() for embedding in embeddings}) == 3
    del ticket
    held = shared_maps()
    embeddings.pop()
    assert shared_maps() == held - 1
    embeddings.clear()
    assert shared_maps() == mapped
    assert open_files() == opened


def test_more_large_embeddings_than_files_in_a_message_are_sent(make_dispatch: MakeCompany) -> None:
    company = make_dispatch(num_servers=1, max_batch_tokens=1000)
    [server] = company.servers
    number = MAX_FILES + 3
    values = [value % 256 for value in range(number)]
    ticket = server.put(*[item(1, value, TOKENS) for value in values])
    opened = open_files()
    batch = company.take()
    batch.finish(*(torch.tensor(value, dtype=torch.uint8).expand(MIB) for value in batch.values))
    embeddings = server.outcome(ticket)
    assert [int(embedding[-1]) for embedding in embeddings] == values
    assert all(len(embedding) == MIB for embedding in embeddings)
    del embeddings, batch, ticket
    assert open_files() == opened


def test_batch_of_very_many_images_is_sent(make_dispatch: MakeCompany) -> None:
    company = make_dispatch(num_servers=1, max_batch_tokens=5000)
    [server] = company.servers
    values = [value % 256 for value in range(3000)]
    ticket = server.put(*[item(1, value) for value in values])
    company.take().finish()
    assert [int(embedding) for embedding in server.outcome(ticket)] == values

"""Captured graphs at the size of the 8B checkpoint: tokens are exact, finite and reproducible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from models import CudaGraphSettings, Patches, VisionEncoder
from models.budgets import infer_budgets
from models.cudagraph_protocol import ReplayBuffers
from models.weights import Checkpoint
from tests.gpu.images import MIXED, patches
from tests.support.checkpoints import reference_tokens, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
GPU = torch.device("cuda", 0)
HALF = [0.5, 0.5, 0.5]


@pytest.fixture(scope="module")
def eager(checkpoint: Checkpoint) -> VisionEncoder:
    return VisionEncoder(checkpoint, GPU, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def graphs(checkpoint: Checkpoint) -> VisionEncoder:
    encoder = VisionEncoder(checkpoint, GPU, dtype=torch.bfloat16, cuda_graphs=CudaGraphSettings())
    manager = encoder.graphs
    print(f"{len(manager.graphs)} budgets, {manager.memory_bytes / 2**30:.2f} GiB")  # noqa: T201
    return encoder


@pytest.fixture(params=["eager", "graphs"])
def either(request: pytest.FixtureRequest) -> VisionEncoder:
    encoder: VisionEncoder = request.getfixturevalue(request.param)
    return encoder


def pinned(images: Sequence[Patches]) -> list[Patches]:
    return [replace(image, pixels=image.pixels.pin_memory()) for image in images]


def test_default_budgets_reach_the_largest_image(graphs: VisionEncoder) -> None:
    assert graphs.graphs.budgets == infer_budgets(64, 16384, CudaGraphSettings().budget_steps)
    before = graphs.graphs.counts.hits
    graphs.encode(patches((256, 256)))
    assert graphs.graphs.counts.hits == before + 1
    assert not graphs.graphs.counts.misses


def test_every_budget_is_as_exact_as_an_eager_run(
    reference: nn.Module, eager: VisionEncoder, graphs: VisionEncoder
) -> None:
    worst = 0.0
    for budget in graphs.graphs.budgets:
        # Full budgets. One image of the largest size would take minutes in float32; test_encoder.py has one.
        images = patches((16, budget // 4)) if budget < 4096 else patches(*[(64, budget // 64)] * 4)
        expected = reference_tokens(reference, images, HALF, HALF)
        replayed, direct = (relative_error(torch.cat(x.encode(images)), expected) for x in (graphs, eager))
        worst = max(worst, replayed / direct)
        assert replayed <= 1.1 * direct, budget
    print(f"worst ratio of errors {worst:.3f}")  # noqa: T201


def test_nan_does_not_survive_its_batch(graphs: VisionEncoder) -> None:
    small = patches((20, 20))
    before = graphs.encode(small)[0].clone()
    bias = graphs.model.patch_embed.proj.bias
    saved = bias.clone()
    with torch.inference_mode():
        bias.fill_(torch.nan)
        poisoned = graphs.encode(patches(*[(64, 64)] * 16))
        assert all(tokens.isnan().any() for tokens in poisoned)
        bias.copy_(saved)
    after = graphs.encode(small)[0]
    assert after.isfinite().all()
    assert torch.equal(after, before)


def test_tokens_are_identical_after_a_large_image(graphs: VisionEncoder) -> None:
    small, large = patches((20, 20)), patches((256, 256))
    first = graphs.encode(small)[0].clone()
    graphs.encode(large)
    assert torch.equal(graphs.encode(small)[0], first)


def test_random_batches_are_finite_and_counted(eager: VisionEncoder, graphs: VisionEncoder) -> None:
    generator = torch.Generator().manual_seed(1)

    def integer(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    pool = patches(*[(2 * (1 + integer(12)), 2 * (8 + integer(16))) for _ in range(64)])
    pool += patches((64, 64), (48, 80))
    manager = graphs.graphs
    hits = manager.counts.hits
    images = 0
    finite = torch.ones((), dtype=torch.bool, device=GPU)
    for number in range(10_000):
        batch = [pool[integer(len(pool))] for _ in range(1 + integer(3))]
        tokens = graphs.encode(batch)
        assert [len(x) for x in tokens] == [image.num_tokens for image in batch]
        for rows in tokens:
            finite &= rows.isfinite().all()
        images += len(batch)
        if number % 1000 == 0:
            for ours, theirs in zip(tokens, eager.encode(batch), strict=True):
                assert relative_error(ours, theirs) < 0.05
    assert finite
    assert manager.counts.hits - hits == images
    assert not manager.counts.misses


def test_mixed_batch_keeps_its_order(eager: VisionEncoder, graphs: VisionEncoder) -> None:
    images = patches(*MIXED)
    for ours, theirs in zip(graphs.encode(images), eager.encode(images), strict=True):
        assert relative_error(ours, theirs) < 0.05


def test_images_are_cut_into_pinned_memory(eager: VisionEncoder) -> None:
    rgb = np.random.default_rng(0).integers(0, 256, (336, 500, 3), dtype=np.uint8)
    ours, ordinary = eager.preprocess(rgb), eager.preprocessor(rgb)
    assert ours.pixels.is_pinned()
    assert not ordinary.pixels.is_pinned()
    assert torch.equal(ours.pixels, ordinary.pixels)


def test_pinned_and_ordinary_patches_give_identical_tokens(either: VisionEncoder) -> None:
    images = patches(*MIXED)
    for ours, theirs in zip(either.encode(pinned(images)), either.encode(images), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("in_memory", [pinned, list])
def test_patches_may_be_changed_after_encode_returns(
    either: VisionEncoder, in_memory: Callable[[Sequence[Patches]], list[Patches]]
) -> None:
    batches = [patches(*[(64, 64 + 2 * number)] * 4) for number in range(3)]
    expected = []
    for batch in batches:
        expected.append(torch.cat(either.encode(batch)))
        torch.cuda.synchronize(GPU)
    results = []
    for number in range(50):
        fresh = [replace(image, pixels=image.pixels.clone()) for image in batches[number % 3]]
        images = in_memory(fresh)
        results.append(either.encode(images))
        for image in images:
            image.pixels.fill_(255)
        del images, fresh  # the next images, with other content, may get their memory
        others = [torch.full((64 * 68, 768), 255, dtype=torch.uint8, pin_memory=True) for _ in range(8)]
        del others
    for number, result in enumerate(results):
        assert torch.equal(torch.cat(result), expected[number % 3]), number


def test_batch_that_fails_while_it_is_written_does_not_affect_later_ones(
    graphs: VisionEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small = patches((128, 128)), patches(*MIXED)
    before = torch.cat(graphs.encode(small))
    model, counts = graphs.graphs.model, graphs.graphs.counts
    errors = counts.misses["error"]
    write = model.prepare_encoder_cudagraph_replay_buffers
    faults = [RuntimeError("no luck")]

    def write_or_fail(batch: Sequence[Patches], buffers: ReplayBuffers) -> None:
        write(batch, buffers)
        if faults:
            raise faults.pop()

    monkeypatch.setattr(model, "prepare_encoder_cudagraph_replay_buffers", write_or_fail)
    for _ in range(3):  # the first one fails and runs eagerly
        graphs.encode(large)
    assert counts.misses["error"] == errors + 1
    for _ in range(4):  # both slots, twice
        assert torch.equal(torch.cat(graphs.encode(small)), before)

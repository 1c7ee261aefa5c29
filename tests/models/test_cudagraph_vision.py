"""Replay of the vision transformer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models import (
    CudaGraphSettings,
    EncodeItem,
    OutputSpec,
    Patches,
    SupportsEncoderCudaGraph,
    VisionEncoder,
)
from models.cudagraph_protocol import ReplayBuffers

SIZES = [(256, 256), (320, 320), (640, 480), (1000, 100), (256, 288), (900, 700)]


@pytest.fixture(scope="module")
def eager() -> VisionEncoder:
    return VisionEncoder.from_pretrained("demo", device="cpu")


@pytest.fixture(scope="module")
def replayed() -> VisionEncoder:
    settings = CudaGraphSettings(token_budgets=(96, 200, 512), max_images_per_batch=3)
    return VisionEncoder.from_pretrained("demo", device="cpu", cuda_graphs=settings)


def patches(encoder: VisionEncoder) -> list[Patches]:
    rng = np.random.default_rng(1)
    return [encoder.preprocess(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in SIZES]


def test_vision_transformer_implements_the_protocol(replayed: VisionEncoder) -> None:
    assert isinstance(replayed.graphs.model, SupportsEncoderCudaGraph)
    assert replayed.graphs.model.get_encoder_cudagraph_budget_range() == (64, 1024)
    assert [x.max_batch_size for x in replayed.graphs.graphs.values()] == [3, 3, 1]


def test_vision_transformer_gives_the_same_tokens_by_replay(
    eager: VisionEncoder, replayed: VisionEncoder
) -> None:
    batch = patches(eager)
    for one, other in zip(eager.encode(batch), replayed.encode(batch), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("places", [[0], [3, 0, 2], [5, 4, 3, 2, 1, 0]])
def test_pixels_of_images_are_written_one_after_the_other(replayed: VisionEncoder, places: list[int]) -> None:
    batch = [patches(replayed)[place] for place in places]
    expected = torch.cat([image.pixels for image in batch])
    rows, grids = torch.full_like(expected, 7), torch.zeros(8, 2, dtype=torch.int32)
    replayed.graphs.model.prepare_encoder_cudagraph_replay_buffers(
        batch, ReplayBuffers(rows, {"grids": grids})
    )
    assert torch.equal(rows, expected)
    unused = [[0, 0]] * (8 - len(batch))
    assert grids.tolist() == [[*image.grid_thw[1:]] for image in batch] + unused


def test_nan_does_not_survive_its_batch(replayed: VisionEncoder) -> None:
    small = patches(replayed)[0]
    before = replayed.encode([small])[0]
    bias = replayed.model.patch_embed.proj.bias
    saved = bias.clone()
    with torch.inference_mode():
        bias.fill_(torch.nan)
        assert replayed.encode([small, patches(replayed)[2]])[1].isnan().all()
        bias.copy_(saved)
    assert torch.equal(replayed.encode([small])[0], before)


def test_replay_gives_pooled_vectors_and_counts(eager: VisionEncoder, replayed: VisionEncoder) -> None:
    outputs = [
        OutputSpec(pooled=True, normalize=True, deepstack=False),
        OutputSpec(),
        OutputSpec(deepstack=False),
    ]
    items = [EncodeItem(image, outputs[i % 3]) for i, image in enumerate(patches(eager))]
    ours, theirs = replayed.run(items), eager.run(items)
    for one, other in zip(ours.embeddings, theirs.embeddings, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    (stats,) = ours.stats
    assert (stats.hits, dict(stats.misses)) == (5, {"oversize": 1})
    assert stats.padding_tokens == sum(budget * n for budget, n in stats.replays.items()) - (
        stats.num_tokens - items[-1].patches.num_tokens
    )

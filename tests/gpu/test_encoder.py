"""The encoder at the size of the 8B checkpoint, on a GPU, against transformers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models import EncodeItem, OutputSpec, VisionEncoder
from models.weights import Checkpoint
from tests.gpu.images import MIXED, patches
from tests.support.checkpoints import reference_tokens, relative_error

pytestmark = pytest.mark.gpu

HALF = [0.5, 0.5, 0.5]
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module", params=[True, False], ids=["fused", "plain"])
def encoder(checkpoint: Checkpoint, request: pytest.FixtureRequest) -> VisionEncoder:
    return VisionEncoder(checkpoint, GPU, dtype=torch.bfloat16, fused_kernels=request.param)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("grids", [MIXED[:1], MIXED, MIXED * 5, [(250, 250)]], ids=["1", "8", "40", "62500"])
def test_bfloat16_is_as_exact_as_the_reference(
    reference: nn.Module, half: nn.Module, encoder: VisionEncoder, grids: list[tuple[int, int]]
) -> None:
    images = patches(*grids)
    expected = reference_tokens(reference, images, HALF, HALF)
    rounded = reference_tokens(half, images, HALF, HALF)
    tokens = torch.cat(encoder.encode(images))
    for level in range(4):
        ours, theirs, truth = (x[:, level * 4096 : (level + 1) * 4096] for x in (tokens, rounded, expected))
        error, bound = relative_error(ours, truth), relative_error(theirs, truth)
        print(f"{len(grids)} images, level {level}: {error:.5f}, reference {bound:.5f}")  # noqa: T201
        assert error <= 1.15 * bound


def test_pooled_vectors_are_made_on_the_device(encoder: VisionEncoder) -> None:
    images = patches(*MIXED)
    pooled = OutputSpec(pooled=True, normalize=True, deepstack=False, dtype=torch.float32)
    result = encoder.run([EncodeItem(image, pooled) for image in images])
    for vector, tokens in zip(result.embeddings, encoder.encode(images), strict=True):
        mean = tokens[:, :4096].double().mean(0).cpu()
        assert relative_error(vector, mean / mean.norm()) < 1e-5
    assert result.stats[0].busy_s > 0


def test_each_image_gets_its_requested_output(encoder: VisionEncoder) -> None:
    images = patches(*MIXED)
    outputs = [
        OutputSpec(pooled=True, deepstack=False, dtype=torch.float32),
        OutputSpec(),
        OutputSpec(deepstack=False, dtype=torch.float16),
        OutputSpec(pooled=True, normalize=True, deepstack=False),
    ] * 2
    result = encoder.run([EncodeItem(p, o) for p, o in zip(images, outputs, strict=True)])
    for rows, tokens, output in zip(result.embeddings, encoder.encode(images), outputs, strict=True):
        expected = tokens.float().cpu() if output.deepstack else tokens[:, :4096].float().cpu()
        if output.pooled:
            expected = expected.mean(0)
        if output.normalize:
            expected = expected / expected.norm()
        assert rows.dtype == (output.dtype or torch.bfloat16)
        assert relative_error(rows, expected) < 4e-3


def test_float32_runs_by_sdpa(reference: nn.Module, checkpoint: Checkpoint) -> None:
    exact = VisionEncoder(checkpoint, GPU, dtype=torch.float32)
    assert exact.attn_backend == "TORCH_SDPA"
    images = patches(*MIXED)
    expected = reference_tokens(reference, images, HALF, HALF)
    error = relative_error(torch.cat(exact.encode(images)), expected)
    print(f"float32: {error:.2e}")  # noqa: T201
    assert error <= 1e-4

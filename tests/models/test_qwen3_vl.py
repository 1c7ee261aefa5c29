from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from models import Patches, VisionEncoder
from models.attention import reference_attention
from models.config import VisionConfig
from models.kernels import PIXEL_CENTER, PlainKernels
from models.positions import interpolated_position_embedding, patch_coordinates, rotary_embedding
from models.qwen3_vl import VisionTransformer, fold_patch_embedding
from tests.support.checkpoints import (
    MODEL_TYPES,
    PROCESSOR,
    build_model,
    reference_tokens,
    relative_error,
    save,
    vision_model,
)

HALF = [0.5, 0.5, 0.5]
# Pixels: 64 tokens, odd ratios, 199:1 both ways, larger than the position table, not multiples of 32.
SIZES = [
    (256, 256),
    (224, 224),
    (336, 336),
    (480, 640),
    (100, 1000),
    (20, 3980),
    (3980, 20),
    (97, 512),
    (701, 333),
    (1024, 768),
    (1600, 64),
    (33, 257),
    (64, 2048),
    (900, 900),
]


def images(encoder: VisionEncoder, sizes: list[tuple[int, int]]) -> list[Patches]:
    rng = np.random.default_rng(7)
    return [encoder.preprocess(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


def columns(tokens: torch.Tensor, encoder: VisionEncoder) -> list[torch.Tensor]:
    """The main columns, then each deepstack level's."""
    return list(tokens.split(encoder.hidden_size, dim=1))


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5"])
def checkpoint(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[VisionEncoder, torch.nn.Module]:
    model = build_model(request.param)
    folder = save(model, tmp_path_factory.mktemp("checkpoint"))
    return VisionEncoder.from_pretrained(str(folder), device="cpu", dtype=torch.float32), vision_model(model)


@pytest.mark.parametrize("size", SIZES)
def test_one_image_equals_the_reference(
    checkpoint: tuple[VisionEncoder, torch.nn.Module], size: tuple[int, int]
) -> None:
    encoder, visual = checkpoint
    batch = images(encoder, [size])
    expected = reference_tokens(visual, batch, HALF, HALF)
    (tokens,) = encoder.encode(batch)
    assert tokens.shape == (batch[0].num_tokens, expected.shape[1])
    for ours, theirs in zip(columns(tokens, encoder), columns(expected, encoder), strict=True):
        assert relative_error(ours, theirs) <= 1e-5


def test_packed_images_equal_the_reference(checkpoint: tuple[VisionEncoder, torch.nn.Module]) -> None:
    encoder, visual = checkpoint
    batch = images(encoder, SIZES)
    expected = reference_tokens(visual, batch, HALF, HALF)
    tokens = torch.cat(encoder.encode(batch))
    for ours, theirs in zip(columns(tokens, encoder), columns(expected, encoder), strict=True):
        assert relative_error(ours, theirs) <= 1e-5


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("shard_size", [None, "100KB"])
@pytest.mark.parametrize("old_prefix", [False, True])
@pytest.mark.parametrize("processor_file", ["preprocessor_config.json", "processor_config.json"])
def test_every_form_of_checkpoint_gives_the_reference_tokens(
    tmp_path: Path, model_type: str, shard_size: str | None, old_prefix: bool, processor_file: str
) -> None:
    model = build_model(model_type)
    folder = save(
        model, tmp_path, shard_size=shard_size, old_prefix=old_prefix, processor_file=processor_file
    )
    assert (len(list(folder.glob("*.safetensors"))) > 2) == (shard_size is not None)
    encoder = VisionEncoder.from_pretrained(str(folder), device="cpu", dtype=torch.float32)
    batch = images(encoder, [(224, 300), (64, 900), (500, 333)])
    expected = reference_tokens(vision_model(model), batch, HALF, HALF)
    tokens = torch.cat(encoder.encode(batch))
    assert tokens.shape == expected.shape
    for ours, theirs in zip(columns(tokens, encoder), columns(expected, encoder), strict=True):
        assert relative_error(ours, theirs) <= 1e-5


def test_normalization_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    mean, std = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]
    model = build_model("qwen3_vl")
    folder = save(model, tmp_path, processor=PROCESSOR | {"image_mean": mean, "image_std": std})
    encoder = VisionEncoder.from_pretrained(str(folder), device="cpu", dtype=torch.float32)
    batch = images(encoder, [(300, 300)])
    expected = reference_tokens(vision_model(model), batch, mean, std)
    assert relative_error(encoder.encode(batch)[0], expected) <= 1e-5
    assert relative_error(expected, reference_tokens(vision_model(model), batch, HALF, HALF)) > 1e-2


def test_tokens_do_not_depend_on_other_images_of_the_batch(
    checkpoint: tuple[VisionEncoder, torch.nn.Module],
) -> None:
    encoder, _ = checkpoint
    small, large = images(encoder, [(256, 256), (700, 500)])
    alone = encoder.encode([small])[0]
    for company in ([small, large], [large, small], [large, small, large]):
        tokens = encoder.encode(company)[company.index(small)]
        assert relative_error(tokens, alone) < 1e-6


def test_empty_batch_has_no_tokens(checkpoint: tuple[VisionEncoder, torch.nn.Module]) -> None:
    assert checkpoint[0].encode([]) == []


def test_folding_is_exact_in_high_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 3, 2, 4, 4, generator=generator, dtype=torch.float64)
    bias = torch.randn(8, generator=generator, dtype=torch.float64)
    pixels = torch.randint(0, 256, (5, 3, 4, 4), generator=generator, dtype=torch.uint8)
    mean, std = (0.1, 0.5, 0.9), (0.2, 0.5, 0.7)

    still = (pixels.double() / 255 - torch.tensor(mean).double()[:, None, None]) / torch.tensor(std).double()[
        :, None, None
    ]
    expected = still[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1) @ weight.flatten(1).T + bias
    folded_weight, folded_bias = fold_patch_embedding(
        weight, bias, mean=mean, std=std, rescale_factor=1 / 255
    )
    actual = (pixels.double() - PIXEL_CENTER).flatten(1) @ folded_weight.T + folded_bias
    assert relative_error(actual, expected) < 1e-7  # mean and std above are float32


def test_centered_pixels_are_exact_in_bfloat16() -> None:
    pixels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal((pixels.to(torch.bfloat16) - PIXEL_CENTER).double(), pixels.double() - PIXEL_CENTER)


def test_coordinates_follow_merge_blocks() -> None:
    grids = torch.tensor([[2, 4], [4, 2]], dtype=torch.int32)
    coordinates = patch_coordinates(grids, 16, merge_size=2)
    assert list(zip(coordinates.row.tolist(), coordinates.column.tolist(), strict=True)) == [
        *[(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)],
        *[(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)],
    ]
    assert coordinates.cu_seqlens.tolist() == [0, 8, 16]
    assert coordinates.cu_seqlens.dtype == torch.int32


def test_padding_rows_are_finite_and_do_not_change_other_rows() -> None:
    table = torch.randn(48 * 48, 8, generator=torch.Generator().manual_seed(0))
    frequencies = torch.tensor([1.0, 0.1])
    exact = patch_coordinates(torch.tensor([[4, 6]], dtype=torch.int32), 24, merge_size=2)
    padded = patch_coordinates(torch.tensor([[4, 6], [0, 0], [0, 0]], dtype=torch.int32), 64, merge_size=2)
    assert padded.cu_seqlens.tolist() == [0, 24, 24, 24]
    for one, other in zip(
        (interpolated_position_embedding(table, exact), *rotary_embedding(exact, frequencies)),
        (interpolated_position_embedding(table, padded), *rotary_embedding(padded, frequencies)),
        strict=True,
    ):
        assert torch.equal(one, other[:24])
        assert other.isfinite().all()


def test_largest_grids_stay_inside_the_position_table() -> None:
    table = torch.ones(48 * 48, 1)
    for grid in ([250, 250], [2, 3620], [3620, 2], [128, 512]):
        coordinates = patch_coordinates(torch.tensor([grid]), grid[0] * grid[1], merge_size=2)
        embedding = interpolated_position_embedding(table, coordinates)
        assert torch.allclose(embedding, torch.ones_like(embedding))


def test_deepstack_columns_depend_only_on_earlier_blocks() -> None:
    config = VisionConfig(
        depth=3, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=8, patch_size=16,
        temporal_patch_size=2, spatial_merge_size=2, in_channels=3, num_position_embeddings=16,
        rope_theta=10000.0, deepstack_visual_indexes=(0, 2),
    )  # fmt: skip
    torch.manual_seed(0)
    model = VisionTransformer(config, reference_attention, PlainKernels()).requires_grad_(False)
    pixels = torch.randint(0, 256, (16, 768), dtype=torch.uint8)

    def levels() -> torch.Tensor:
        out = torch.full((3, 4, 8), torch.nan)
        model(pixels, torch.tensor([[4, 4]], dtype=torch.int32), out, max_length=16, padded=False)
        return out

    before = levels()
    assert before.isfinite().all()
    model.get_parameter("blocks.1.mlp.linear_fc2.bias").add_(1.0)
    changed = [not torch.equal(a, b) for a, b in zip(before, levels(), strict=True)]
    assert changed == [True, False, True]  # main, deepstack 0 (block 0), deepstack 1 (block 2)

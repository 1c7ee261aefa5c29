from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.utils import is_torchvision_available

from models import AspectRatioError, Patches, PreprocessConfig, Preprocessor
from models import preprocess as module
from tests.support.checkpoints import PROCESSOR

CONFIG = PreprocessConfig(
    patch_size=16, temporal_patch_size=2, merge_size=2, min_pixels=65536, max_pixels=16777216,
    mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), rescale_factor=1 / 255,
)  # fmt: skip
SIZES = [(256, 256), (224, 224), (336, 336), (480, 640), (1000, 1000), (20, 3980), (97, 1000), (1333, 750)]


def reference_levels(pixel_values: torch.Tensor) -> torch.Tensor:
    """Converts the reference's normalized patches [n, 1536] to levels 0 to 255 of one frame [n, 768]."""
    frames = pixel_values.unflatten(1, (3, 2, 16, 16))
    assert torch.equal(frames[:, :, 0], frames[:, :, 1])
    levels: torch.Tensor = ((frames[:, :, 0].double() * 0.5 + 0.5) * 255).round().flatten(1)
    return levels


def picture(height: int, width: int) -> np.ndarray:
    """Random shapes at several scales, as in a photograph. The finest are single pixels."""
    rng = np.random.default_rng(height * width)
    levels = np.zeros((height, width, 3))
    for scale, weight in ((64, 0.5), (16, 0.25), (4, 0.15), (1, 0.1)):
        small = rng.integers(0, 256, (height // scale + 2, width // scale + 2, 3), dtype=np.uint8)
        levels += weight * np.asarray(
            Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
        )
    return levels.round().astype(np.uint8)


@pytest.mark.parametrize("seed", range(10))
def test_smart_resize_equals_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(1000):
        factor = int(rng.choice([8, 28, 32]))
        height, width = (int(x) for x in np.exp(rng.uniform(np.log(2), np.log(9000), 2)))
        if rng.random() < 0.3:  # exact halves, where the rounding matters
            height, width = (int(x) * factor + factor // 2 for x in rng.integers(1, 40, 2))
        low, high = sorted(int(x) for x in np.exp(rng.uniform(np.log(factor**2), np.log(2**25), 2)))
        limits = {"factor": factor, "min_pixels": low, "max_pixels": high}
        try:
            expected = smart_resize(height, width, **limits)
        except ValueError:
            with pytest.raises(AspectRatioError):
                module.smart_resize(height, width, **limits)
            continue
        assert module.smart_resize(height, width, **limits) == expected, (height, width, limits)


@pytest.mark.parametrize(
    ("size", "tokens"),
    [((224, 224), 64), ((336, 336), 100), ((4096, 4096), 16384), ((14, 886), 128), ((1, 200), 114)],
)
def test_number_of_tokens_follows_from_the_size(size: tuple[int, int], tokens: int) -> None:
    limits = {"max_pixels": 65536} if size == (14, 886) else {}
    config = PreprocessConfig(**(CONFIG.__dict__ | limits))
    assert Preprocessor(config).num_tokens(*size) == tokens


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (20, 4001)])
def test_aspect_ratio_over_200_is_an_error(size: tuple[int, int]) -> None:
    with pytest.raises(AspectRatioError, match="over 200"):
        Preprocessor(CONFIG).num_tokens(*size)


@pytest.mark.parametrize("size", SIZES)
def test_patches_are_within_two_levels_of_the_reference(size: tuple[int, int]) -> None:
    rgb = picture(*size)
    processor = Qwen2VLImageProcessorPil(**PROCESSOR)
    expected = processor(images=Image.fromarray(rgb), return_tensors="pt")
    patches = Preprocessor(CONFIG)(rgb)
    assert patches.grid_thw == tuple(expected["image_grid_thw"][0].tolist())
    assert patches.pixels.dtype == torch.uint8
    assert patches.pixels.shape == (patches.grid_thw[1] * patches.grid_thw[2], 768)
    difference = (patches.pixels.double() - reference_levels(expected["pixel_values"])).abs()
    assert difference.max() <= 2
    assert (difference > 0).double().mean() < 0.005


@pytest.mark.skipif(not is_torchvision_available(), reason="torchvision is not installed")
@pytest.mark.parametrize("size", SIZES)
def test_patches_equal_the_torchvision_reference(size: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    rgb = picture(*size)
    processor = Qwen2VLImageProcessor(**PROCESSOR)
    expected = processor(images=Image.fromarray(rgb), return_tensors="pt")
    patches = Preprocessor(CONFIG)(rgb)
    assert patches.grid_thw == tuple(expected["image_grid_thw"][0].tolist())
    assert torch.equal(patches.pixels.double(), reference_levels(expected["pixel_values"]))


@pytest.mark.parametrize(
    "limits", [(1, 1), (65536, 65536), (4194304, 4194304), (65536, 1048576), (16777216,) * 2]
)
def test_max_num_tokens_is_a_tight_bound(limits: tuple[int, int]) -> None:
    low, high = limits
    preprocessor = Preprocessor(replace(CONFIG, min_pixels=low, max_pixels=high))
    most = 0
    for short in (*range(1, 60), 97, 333, 1000, 3001):
        for ratio in (1, 1.01, 1.5, 7, 33, 99.5, 150, 163.83, 199, 200):
            most = max(most, preprocessor.num_tokens(short, int(short * ratio)))
    bound = preprocessor.max_num_tokens
    assert most <= bound
    assert bound <= 2 * most


def test_patches_are_compared_by_identity() -> None:
    patches: list[Patches] = [Preprocessor(CONFIG)(picture(256, 256)) for _ in range(2)]
    assert patches.index(patches[1]) == 1


@pytest.mark.parametrize(
    "rgb",
    [
        np.zeros((64, 64, 4), np.uint8),
        np.zeros((64, 64), np.uint8),
        np.zeros((64, 64, 3)),
        np.zeros((0, 4, 3), np.uint8),
    ],
)
def test_array_that_is_not_rgb_is_an_error(rgb: np.ndarray) -> None:
    with pytest.raises(ValueError, match="an image is a uint8 array"):
        Preprocessor(CONFIG)(rgb)


def test_image_of_the_right_size_keeps_its_pixels() -> None:
    rgb = picture(512, 512)
    patches = Preprocessor(CONFIG)(rgb)
    first = patches.pixels[0].unflatten(0, (3, 16, 16)).permute(1, 2, 0)
    assert np.array_equal(first.numpy(), rgb[:16, :16])
    second_block = patches.pixels[4].unflatten(0, (3, 16, 16)).permute(1, 2, 0)
    assert np.array_equal(second_block.numpy(), rgb[:16, 32:48])
    assert patches.pixels.untyped_storage().data_ptr() != rgb.ctypes.data


@pytest.mark.parametrize("size", [(256, 256), (512, 320), (64, 1120)])
def test_patches_are_cut_block_by_block(size: tuple[int, int]) -> None:
    rgb = picture(*size)
    height, width = size
    patches = Preprocessor(CONFIG)(rgb, pin_memory=False)
    expected = [
        rgb[y : y + 16, x : x + 16].transpose(2, 0, 1).ravel()
        for top in range(0, height, 32)
        for left in range(0, width, 32)
        for y in (top, top + 16)
        for x in (left, left + 16)
    ]
    assert np.array_equal(patches.pixels.numpy(), np.stack(expected))
    assert patches.pixels.is_contiguous()
    assert torch.equal(Preprocessor(CONFIG)(rgb).pixels, patches.pixels)

"""Turns an RGB array into patches, as the checkpoint's own image processor does.

Knows sizes, limits and the order of patches. Knows nothing of files, formats or devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

MAX_ASPECT_RATIO = 200


class AspectRatioError(ValueError):
    """The longer side is more than 200 times the shorter one. The model was not trained on such images."""


@dataclass(frozen=True)
class PreprocessConfig:
    """The checkpoint's preprocessing. Sizes in pixels, limits in pixels of the resized image."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float

    @property
    def factor(self) -> int:
        """The sides of a resized image are multiples of this number of pixels."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, eq=False)
class Patches:
    """One image, ready for the encoder."""

    pixels: torch.Tensor  # uint8 [t·h·w, channels·patch·patch], rows in merge-block order
    grid_thw: tuple[int, int, int]  # in patches, before the spatial merge
    num_tokens: int  # output rows, after the spatial merge


def smart_resize(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Returns the (height, width) in pixels that an image is resized to.

    Both are multiples of `factor`, their product lies between the limits where the aspect ratio allows
    it, and halves round to even. Source: `smart_resize` of the Qwen2-VL image processor in transformers.
    Raises `AspectRatioError` over an aspect ratio of 200.
    """
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise AspectRatioError(
            f"the aspect ratio of {width} x {height} is over {MAX_ASPECT_RATIO}; crop the image or scale it"
        )
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


class Preprocessor:
    """Turns RGB arrays into `Patches`. Holds no state but its configuration, so threads may share it."""

    def __init__(self, config: PreprocessConfig) -> None:
        self.config = config

    def grid_thw(self, height: int, width: int) -> tuple[int, int, int]:
        """Returns the grid, in patches, of an image with that size in pixels. Raises `AspectRatioError`."""
        config = self.config
        new_height, new_width = smart_resize(
            height, width, factor=config.factor, min_pixels=config.min_pixels, max_pixels=config.max_pixels
        )
        return 1, new_height // config.patch_size, new_width // config.patch_size

    def num_tokens(self, height: int, width: int) -> int:
        """Returns the output tokens of an image with that size in pixels. Raises `AspectRatioError`."""
        t, h, w = self.grid_thw(height, width)
        return t * h * w // self.config.merge_size**2

    @property
    def max_num_tokens(self) -> int:
        """An upper bound on the output tokens of an image.

        `max_pixels` alone is no bound: a thin image keeps a row of tokens, however small `max_pixels` is, and
        both sides of an image that grows to `min_pixels` are rounded up.
        """
        smallest, largest = (
            x / self.config.factor**2 for x in (self.config.min_pixels, self.config.max_pixels)
        )
        grown = (math.sqrt(smallest * MAX_ASPECT_RATIO) + 1) * (math.sqrt(smallest / MAX_ASPECT_RATIO) + 1)
        return math.floor(max(largest, math.sqrt(largest * MAX_ASPECT_RATIO), grown))

    def __call__(self, rgb: npt.NDArray[np.uint8], *, pin_memory: bool = False) -> Patches:
        """Resizes a uint8 array [height, width, 3] and cuts it into patches. Raises `AspectRatioError`.

        A GPU copies patches from pinned memory while the host continues.
        """
        if rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3 or rgb.size == 0:
            raise ValueError(f"an image is a uint8 array [height, width, 3], not {rgb.dtype} {rgb.shape}")
        height, width, channels = rgb.shape
        grid = self.grid_thw(height, width)
        _, h, w = grid
        patch, merge = self.config.patch_size, self.config.merge_size
        resized = _resize(rgb, h * patch, w * patch)
        # [h/merge, merge, patch, w/merge, merge, patch, c]
        blocks = resized.reshape(h // merge, merge, patch, w // merge, merge, patch, channels)
        # [h/merge, w/merge, merge, merge, c, patch, patch]
        cut = blocks.transpose(0, 3, 1, 4, 6, 2, 5)
        pixels = _host_memory((h * w, channels * patch * patch), pin_memory)
        pixels.numpy().reshape(cut.shape)[:] = cut
        return Patches(pixels, grid, num_tokens=h * w // merge**2)


def _host_memory(shape: tuple[int, int], pin_memory: bool) -> torch.Tensor:
    if pin_memory:
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(np.empty(shape, np.uint8))  # by numpy for the reason given in `_resize`


def _resize(rgb: npt.NDArray[np.uint8], height: int, width: int) -> npt.NDArray[np.uint8]:
    """Bicubic with antialiasing on uint8: the kernel of torchvision's resize, which is the reference."""
    if rgb.shape[:2] == (height, width):
        return rgb
    rgb = np.require(rgb, requirements="W")  # torch warns about read-only arrays
    # numpy transposes: every call of torch releases the interpreter lock and has to acquire it again.
    image = torch.from_numpy(rgb.transpose(2, 0, 1)[None])  # [1, 3, H, W], memory stays channels-last
    resized = F.interpolate(image, size=(height, width), mode="bicubic", antialias=True)
    pixels: npt.NDArray[np.uint8] = resized.numpy()[0].transpose(1, 2, 0)
    return pixels

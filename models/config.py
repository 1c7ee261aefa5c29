"""Reads the configuration of the vision transformer and its image processor from a checkpoint's JSON files.

Knows the names of files and fields; knows nothing of tensors, downloads or devices. All values come from the
checkpoint. A missing value is an error that names it, except for the few values that published checkpoints
leave to the defaults of transformers' classes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from models.errors import ModelError
from models.preprocess import PreprocessConfig

MODEL_TYPES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")  # as transformers reads them
BICUBIC = 3  # Pillow's number, which image processor files use
RESCALE_FACTOR = 1 / 255  # transformers' default; published files leave it out


@dataclass(frozen=True)
class VisionConfig:
    """The shape of the vision transformer."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    in_channels: int
    num_position_embeddings: int
    rope_theta: float
    deepstack_visual_indexes: tuple[int, ...]

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def grid_side(self) -> int:
        """Rows and columns of the square table of position embeddings."""
        return math.isqrt(self.num_position_embeddings)

    @property
    def patch_dim(self) -> int:
        """Values of one patch of a still image."""
        return self.in_channels * self.patch_size**2

    @property
    def width(self) -> int:
        """Columns of one output token: the main ones, then those of each deepstack level."""
        return self.out_hidden_size * (1 + len(self.deepstack_visual_indexes))


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises `ModelError` if there is no file or no object in it."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"the checkpoint has no {path.name}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} does not hold a JSON object")
    return value


def read_vision_config(folder: Path) -> VisionConfig:
    """Reads `config.json` in the folder. Raises `ModelError` if it is missing, invalid or not supported."""
    raw = read_json(folder / "config.json")
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ModelError(f"config.json: model_type {model_type!r} is not one of {', '.join(MODEL_TYPES)}")
    if not isinstance(raw.get("vision_config"), dict):
        raise ModelError("config.json has no vision_config")
    try:
        # A plain data class of transformers: it adds values that older files lack and runs no remote code.
        # The import takes a second, and not every process needs it.
        mapping = import_module("transformers").CONFIG_MAPPING
        parsed = mapping[model_type].from_dict(raw).vision_config
    except Exception as error:  # validators raise errors of their own, parsers AttributeError, IndexError …
        raise ModelError(f"config.json: {_first_line(error)}") from None
    return _vision_config(raw["vision_config"], parsed.rope_parameters, model_type)


def _vision_config(
    raw: Mapping[str, Any], rope_parameters: Mapping[str, Any], model_type: str
) -> VisionConfig:
    source = "config.json: vision_config"
    activation = raw.get("hidden_act")
    if activation != "gelu_pytorch_tanh":
        raise ModelError(f"{source}.hidden_act {activation!r} is not supported, only 'gelu_pytorch_tanh'")
    if "deepstack_visual_indexes" not in raw and not model_type.startswith("qwen3_5"):
        raise ModelError(f"{source} has no deepstack_visual_indexes")
    names = [name for name in VisionConfig.__dataclass_fields__ if name in _INTEGER_FIELDS]
    config = VisionConfig(
        **{name: _positive_int(raw, name, source) for name in names},
        rope_theta=_positive_number(rope_parameters, "rope_theta", f"{source}.rope_parameters"),
        deepstack_visual_indexes=tuple(raw.get("deepstack_visual_indexes") or ()),
    )
    _check_shape(config, source)
    return config


_INTEGER_FIELDS = frozenset(
    name
    for name in VisionConfig.__dataclass_fields__
    if name not in ("rope_theta", "deepstack_visual_indexes")
)


def _check_shape(config: VisionConfig, source: str) -> None:
    if config.hidden_size % (4 * config.num_heads) != 0:
        raise ModelError(
            f"{source}: hidden_size {config.hidden_size} over {config.num_heads} heads is not a multiple of 4"
        )
    if config.grid_side**2 != config.num_position_embeddings:
        raise ModelError(f"{source}.num_position_embeddings {config.num_position_embeddings} is not a square")
    indexes = config.deepstack_visual_indexes
    if any(not isinstance(index, int) or not 0 <= index < config.depth for index in indexes):
        raise ModelError(
            f"{source}.deepstack_visual_indexes {list(indexes)} are not blocks of {config.depth}"
        )
    if list(indexes) != sorted(set(indexes)):
        raise ModelError(f"{source}.deepstack_visual_indexes {list(indexes)} are not in ascending order")


def read_preprocess_config(folder: Path, vision: VisionConfig) -> PreprocessConfig:
    """Reads the image processor's configuration from the first of `PROCESSOR_FILES` that has one.

    Raises `ModelError` if there is none, if a value is missing, if it needs a step that is not supported, or
    if it contradicts the vision configuration.
    """
    raw, source = _find_processor(folder)
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if raw.get(name, True) is not True:
            raise ModelError(f"{source}: {name} {raw[name]!r} is not supported, only true")
    if raw.get("resample", BICUBIC) != BICUBIC:
        raise ModelError(f"{source}: resample {raw['resample']!r} is not supported, only {BICUBIC} (bicubic)")
    shortest, longest = _pixel_limits(raw, source)
    config = PreprocessConfig(
        patch_size=_positive_int(raw, "patch_size", source),
        temporal_patch_size=_positive_int(raw, "temporal_patch_size", source),
        merge_size=_positive_int(raw, "merge_size", source),
        min_pixels=shortest,
        max_pixels=longest,
        mean=_channel_values(raw, "image_mean", source, vision.in_channels),
        std=_channel_values(raw, "image_std", source, vision.in_channels),
        rescale_factor=_number({"rescale_factor": RESCALE_FACTOR, **raw}, "rescale_factor", source),
    )
    here = (config.patch_size, config.temporal_patch_size, config.merge_size)
    there = (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
    if here != there:
        raise ModelError(
            f"{source}: patch, temporal patch and merge sizes {here} differ from config.json's {there}"
        )
    if not all(config.std):
        raise ModelError(f"{source}: image_std holds a zero")
    return config


def _find_processor(folder: Path) -> tuple[dict[str, Any], str]:
    for name in PROCESSOR_FILES:
        if not (folder / name).exists():
            continue
        raw = read_json(folder / name)
        nested = raw.get("image_processor")
        if isinstance(nested, dict):
            return nested, f"{name}: image_processor"
        if name != "processor_config.json":
            return raw, name
    raise ModelError(f"the checkpoint has no image processor in {' or '.join(PROCESSOR_FILES)}")


def _pixel_limits(raw: Mapping[str, Any], source: str) -> tuple[int, int]:
    """Returns both limits. As in transformers, the older `min_pixels` and `max_pixels` win over `size`."""
    size = raw.get("size")
    merged = dict(size) if isinstance(size, dict) else {}
    for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if raw.get(old) is not None:
            merged[new] = raw[old]
    source = f"{source}.size"
    limits = _positive_int(merged, "shortest_edge", source), _positive_int(merged, "longest_edge", source)
    if limits[0] > limits[1]:
        raise ModelError(f"{source}: shortest_edge {limits[0]} is over longest_edge {limits[1]}")
    return limits


def _required(raw: Mapping[str, Any], name: str, source: str) -> Any:
    value = raw.get(name)
    if value is None:
        raise ModelError(f"{source} has no {name}")
    return value


def _positive_int(raw: Mapping[str, Any], name: str, source: str) -> int:
    value = _required(raw, name, source)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"{source}.{name} {value!r} is not a positive whole number")
    return value


def _number(raw: Mapping[str, Any], name: str, source: str) -> float:
    value = _required(raw, name, source)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ModelError(f"{source}.{name} {value!r} is not a number")
    return float(value)


def _positive_number(raw: Mapping[str, Any], name: str, source: str) -> float:
    value = _number(raw, name, source)
    if value <= 0:
        raise ModelError(f"{source}.{name} {value!r} is not positive")
    return value


def _channel_values(raw: Mapping[str, Any], name: str, source: str, channels: int) -> tuple[float, ...]:
    values = _required(raw, name, source)
    if not isinstance(values, list) or len(values) != channels:
        raise ModelError(f"{source}.{name} {values!r} does not hold {channels} numbers")
    return tuple(_number({name: value}, name, source) for value in values)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

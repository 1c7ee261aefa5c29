"""Tiny checkpoints written by transformers, and its vision models as a reference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from models.preprocess import Patches

TINY_VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 96,
    "num_heads": 4,
    "intermediate_size": 136,
    "out_hidden_size": 40,
    "num_position_embeddings": 2304,
}
DEEPSTACK = {"deepstack_visual_indexes": [0, 2]}
TINY_TEXT: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 128,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
}
TINY_MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
TINY_LINEAR = {
    "layer_types": ["full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
PROCESSOR: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessor",
    "merge_size": 2,
    "patch_size": 16,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "temporal_patch_size": 2,
}
# As in published checkpoints, which leave other values to the defaults of transformers' class.
SHORT_PROCESSOR: dict[str, Any] = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
MODEL_TYPES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


def build_model(model_type: str = "qwen3_vl", **vision: Any) -> nn.Module:
    """Builds a tiny complete model of that type. All its weights are random, also norms and biases."""
    text = dict(TINY_TEXT)
    vision = TINY_VISION | ({} if model_type.startswith("qwen3_5") else DEEPSTACK) | vision
    if model_type.endswith("moe"):
        text |= TINY_MOE
    if model_type.startswith("qwen3_5"):
        text |= TINY_LINEAR
    config_class, model_class = {
        "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
        "qwen3_vl_moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration),
        "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
        "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
    }[model_type]
    model: nn.Module = model_class(config_class(text_config=text, vision_config=vision)).eval()
    randomize(vision_model(model))
    return model


def vision_model(model: nn.Module) -> nn.Module:
    part: nn.Module = model.get_submodule("model.visual")
    return part


def randomize(module: nn.Module, seed: int = 0) -> None:
    """Sets random values that keep activations near 1, so that every part of the model has an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                noise = noise * 0.2 + (1.0 if name.endswith("weight") else 0.0)
            elif name.endswith("bias"):
                noise = noise * 0.2
            elif "pos_embed" not in name:
                noise = noise * parameter[0].numel() ** -0.5
            parameter.copy_(noise)


def save(
    model: nn.Module,
    folder: Path,
    *,
    shard_size: str | None = None,
    processor: dict[str, Any] | None = None,
    processor_file: str = "preprocessor_config.json",
    old_prefix: bool = False,
) -> Path:
    """Writes the model as transformers does, and the configuration of its image processor."""
    model.save_pretrained(folder, **({} if shard_size is None else {"max_shard_size": shard_size}))  # type: ignore[operator]
    content = PROCESSOR if processor is None else processor
    if processor_file == "processor_config.json":
        content = {"image_processor": content, "processor_class": "Qwen3VLProcessor"}
    (folder / processor_file).write_text(json.dumps(content))
    if old_prefix:
        _rename_tensors(folder)
    return folder


def _rename_tensors(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name.replace("model.visual.", "visual."): x for name, x in tensors.items()}, file)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        index.write_text(index.read_text().replace('"model.visual.', '"visual.'))


def reference_pixels(patches: Patches, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Returns the pixels of patches in the form of the reference: normalized, frames repeated, [n, 1536]."""
    pixels = patches.pixels.unflatten(1, (3, 1, 16, 16)).double() / 255  # [n, channels, 1, patch, patch]
    means, stds = (torch.tensor(x, dtype=torch.float64)[:, None, None, None] for x in (mean, std))
    repeated: torch.Tensor = ((pixels - means) / stds).expand(-1, -1, 2, -1, -1)
    return repeated.flatten(1).float()


def reference_tokens(
    visual: nn.Module, images: Sequence[Patches], mean: Sequence[float], std: Sequence[float]
) -> torch.Tensor:
    """Returns transformers' tokens of packed images, with deepstack columns, on the module's device."""
    parameter = next(visual.parameters())
    pixels = torch.cat([reference_pixels(image, mean, std) for image in images]).to(parameter)
    grids = torch.tensor([image.grid_thw for image in images], device=parameter.device)
    with torch.inference_mode():
        output = visual(pixels, grids)
    return torch.cat([output.pooler_output, *getattr(output, "deepstack_features", [])], dim=-1)


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns ‖value - expected‖ / ‖expected‖ in float64. NaN and infinity are never under a bound."""
    value, expected = value.double(), expected.double()
    return float((value - expected).norm() / expected.norm())

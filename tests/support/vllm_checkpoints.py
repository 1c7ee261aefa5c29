"""Tiny whole checkpoints with a tokenizer and a chat template, which vLLM and this server can both serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from torch import nn
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from tests.support.checkpoints import SHORT_PROCESSOR, randomize, save
from tests.support.project import ROOT

LLM_TYPES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5")

_CLASSES = {
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "qwen3_vl_moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration),
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
}
_HIDDEN_SIZE = 64
_TEXT: dict[str, Any] = {
    "hidden_size": _HIDDEN_SIZE,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
_FULL_ROPE = {"head_dim": 32, "rope_parameters": _ROPE | {"mrope_section": [6, 5, 5]}}
# Of each type besides `_TEXT`.
_TYPE_TEXT: dict[str, dict[str, Any]] = {
    "qwen3_vl": _FULL_ROPE,
    "qwen3_vl_moe": _FULL_ROPE
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,  # in published files; vLLM needs it
    },
    "qwen3_5": {
        "head_dim": 64,
        "rope_parameters": _ROPE | {"mrope_section": [3, 3, 2], "partial_rotary_factor": 0.25},
        # vLLM's linear attention on a CPU needs bfloat16, in which answers cannot be compared closely.
        "layer_types": ["full_attention", "full_attention"],
    },
}
_VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 96,
    "num_heads": 4,
    "intermediate_size": 136,
    "out_hidden_size": _HIDDEN_SIZE,
    "num_position_embeddings": 2304,
}
_DEEPSTACK = {"deepstack_visual_indexes": [0, 2]}

_PAD, _START, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPECIAL_IDS = {  # members of a configuration, and the special tokens whose ids they are
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_SPECIAL = [_PAD, _START, _END, *_SPECIAL_IDS.values()]
_TEMPLATE = """\
{%- macro show(content) -%}
  {%- if content is string -%}{{ content }}
  {%- else -%}
    {%- for part in content -%}
      {%- if 'text' in part -%}{{ part.text }}
      {%- else -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
  {{- '<|im_start|>' ~ message.role ~ '\\n' ~ show(message.content) ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
_VIDEO_PROCESSOR: dict[str, Any] = {
    **{name: value for name, value in SHORT_PROCESSOR.items() if name != "image_processor_type"},
    "video_processor_type": "Qwen3VLVideoProcessor",
}


def write_checkpoint(model_type: str, folder: Path) -> Path:
    """Writes a checkpoint of one of `LLM_TYPES` with random weights, always the same."""
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    save(_model(model_type, tokenizer), folder, processor=SHORT_PROCESSOR)
    _transpose_experts(folder / "model.safetensors")
    (folder / "video_preprocessor_config.json").write_text(json.dumps(_VIDEO_PROCESSOR))
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    """Byte pairs of the words of a text that does not change."""
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([(ROOT / "LICENSE").read_text()], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_END, pad_token=_PAD, additional_special_tokens=_SPECIAL
    )
    fast.chat_template = _TEMPLATE
    return fast


def _model(model_type: str, tokenizer: PreTrainedTokenizerFast) -> nn.Module:
    ids = tokenizer.convert_tokens_to_ids
    text = _TEXT | _TYPE_TEXT[model_type]
    text |= {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "eos_token_id": ids(_END),
        "pad_token_id": ids(_PAD),
    }
    vision = _VISION | ({} if model_type == "qwen3_5" else _DEEPSTACK)
    config_class, model_class = _CLASSES[model_type]
    config = config_class(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        **{name: ids(token) for name, token in _SPECIAL_IDS.items()},
    )
    model: nn.Module = model_class(config).eval()
    randomize(model)
    with torch.no_grad():
        model.get_parameter("lm_head.weight").mul_(3)  # so that greedy tokens are far from a tie
        for name, parameter in model.named_parameters():
            if model_type == "qwen3_5" and "language_model" in name and "norm" in name:
                parameter.sub_(1)  # this model adds 1 to the weights of its norms
    return model


def _transpose_experts(file: Path) -> None:
    """Experts [experts, in, out], as in published files, from transformers' [experts, out, in]."""
    tensors = load_file(file)
    changed = {name: x.mT.contiguous() if ".experts." in name else x for name, x in tensors.items()}
    save_file(changed, file, metadata={"format": "pt"})

"""Checkpoints in a folder: what is read, and errors that name the cause."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import ModelError, VisionEncoder
from models.weights import INDEX_FILE, SINGLE_FILE, fingerprint, open_checkpoint
from tests.support.checkpoints import PROCESSOR, SHORT_PROCESSOR, build_model, save

FC1 = "model.visual.blocks.1.mlp.linear_fc1.weight"


def load(folder: Path) -> VisionEncoder:
    return VisionEncoder.from_pretrained(str(folder), device="cpu", dtype=torch.float32)


def edit_json(path: Path, **changes: Any) -> None:
    """Changes members of the JSON object in a file. `a__b` is member b of a; `...` removes the member."""
    content = json.loads(path.read_text())
    for name, value in changes.items():
        target = content
        *outer, last = name.split("__")
        for part in outer:
            target = target[part]
        if value is ...:
            target.pop(last)
        else:
            target[last] = value
    path.write_text(json.dumps(content))


def edit_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / SINGLE_FILE) | changes
    save_file({name: x for name, x in tensors.items() if x is not None}, folder / SINGLE_FILE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({FC1: None}, "missing blocks.1.mlp.linear_fc1.weight"),
        ({"model.visual.blocks.9.extra": torch.zeros(1)}, "unexpected blocks.9.extra"),
        ({FC1: torch.zeros(3, 5)}, r"blocks.1.mlp.linear_fc1.weight is \[3, 5\], not \[136, 96\]"),
        ({FC1: torch.zeros(136, 96, dtype=torch.float8_e4m3fn)}, "quantized encoders are not supported"),
        ({FC1: torch.zeros(136, 96, dtype=torch.int8)}, "quantized encoders are not supported"),
    ],
)
def test_error_names_tensors_that_do_not_fit(
    folder: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    edit_tensors(folder, changes)
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_error_lists_only_the_first_problems(folder: Path) -> None:
    edit_json(folder / "config.json", vision_config__depth=9)
    with pytest.raises(ModelError, match="and 55 more") as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_checkpoint_without_an_encoder_is_an_error(folder: Path) -> None:
    save_file({"lm_head.weight": torch.zeros(2)}, folder / SINGLE_FILE)
    with pytest.raises(ModelError, match="no vision encoder"):
        load(folder)


def test_tensor_under_both_prefixes_is_an_error(folder: Path) -> None:
    edit_tensors(folder, {FC1.removeprefix("model."): torch.zeros(136, 96)})
    with pytest.raises(ModelError, match="the checkpoint has tensor .* twice"):
        load(folder)


def test_only_safetensors_are_read(folder: Path) -> None:
    (folder / SINGLE_FILE).rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no model.safetensors \(only safetensors are read\)"):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 100])
def test_broken_file_is_an_error(folder: Path, content: bytes) -> None:
    (folder / SINGLE_FILE).write_bytes(content)
    with pytest.raises(ModelError, match="model.safetensors cannot be read"):
        load(folder)


def test_truncated_file_is_an_error(folder: Path) -> None:
    content = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match="model.safetensors cannot be read"):
        load(folder)


def test_only_the_shards_that_hold_the_encoder_are_needed(sharded: Path, tmp_path: Path) -> None:
    weight_map = json.loads((sharded / INDEX_FILE).read_text())["weight_map"]
    needed = {file for name, file in weight_map.items() if ".visual." in name}
    assert 1 < len(needed) < len(set(weight_map.values()))
    for file in [*needed, INDEX_FILE, "config.json", "preprocessor_config.json"]:
        shutil.copy(sharded / file, tmp_path)
    assert load(tmp_path).fingerprint == load(sharded).fingerprint


def test_error_names_a_missing_shard(sharded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "copy"))
    shard = json.loads((folder / INDEX_FILE).read_text())["weight_map"][FC1]
    (folder / shard).unlink()
    with pytest.raises(ModelError, match=f"no {shard}"):
        load(folder)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "model.bin"])
def test_index_cannot_name_files_outside_the_folder(sharded: Path, tmp_path: Path, shard: str) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "copy"))
    weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    edit_json(folder / INDEX_FILE, weight_map=weight_map | {FC1: shard})
    with pytest.raises(ModelError, match="not a safetensors file in its folder"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llava"}, "model_type 'llava' is not one of qwen3_vl, qwen3_vl_moe, qwen3_5"),
        ({"model_type": ..., "auto_map": {"AutoConfig": "evil.Config"}}, "model_type None is not one of"),
        ({"vision_config": ...}, "has no vision_config"),
        ({"vision_config__depth": ...}, "vision_config has no depth"),
        ({"vision_config__depth": "4"}, "config.json: .*depth"),
        ({"vision_config__depth": -1}, "vision_config.depth -1 is not a positive whole number"),
        ({"vision_config__hidden_act": "silu"}, "hidden_act 'silu' is not supported"),
        ({"vision_config__num_heads": 5}, "hidden_size 96 over 5 heads"),
        ({"vision_config__num_position_embeddings": 2300}, "2300 is not a square"),
        ({"vision_config__deepstack_visual_indexes": [0, 4]}, "are not blocks of 4"),
        ({"vision_config__deepstack_visual_indexes": [2, 0]}, "not in ascending order"),
        ({"vision_config__deepstack_visual_indexes": ...}, "has no deepstack_visual_indexes"),
        ({"vision_config__rope_parameters__rope_theta": None}, "rope_parameters has no rope_theta"),
        (
            {"vision_config__rope_parameters__rope_theta": "x"},
            "rope_parameters.rope_theta 'x' is not a number",
        ),
        ({"vision_config__rope_parameters__rope_theta": [1]}, "rope_theta \\[1\\] is not a number"),
        ({"vision_config__rope_parameters__rope_theta": float("nan")}, "rope_theta nan is not a number"),
        ({"vision_config__rope_parameters__rope_theta": 0}, "rope_theta 0.0 is not positive"),
        ({"vision_config__rope_parameters__rope_theta": -1.5}, "rope_theta -1.5 is not positive"),
        # Errors of transformers: one of its own, AttributeError and IndexError.
        ({"vision_config__depth": {}}, "config.json: .*depth"),
        ({"dtype": "x"}, "config.json: .*'x'"),
        ({"dtype": []}, "config.json: list index out of range"),
    ],
)
def test_error_names_a_configuration_that_is_not_supported(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ModelError, match=message) as error:
        load(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_mean": ...}, "has no image_mean"),
        ({"image_mean": [0.5]}, "does not hold 3 numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std holds a zero"),
        ({"rescale_factor": "1/255"}, "is not a number"),
        ({"patch_size": 14}, "differ from config.json's"),
        ({"do_normalize": False}, "do_normalize False is not supported"),
        ({"resample": 2}, "resample 2 is not supported"),
        ({"size": ...}, "has no shortest_edge"),
        ({"size": {"shortest_edge": 10, "longest_edge": 5}}, "shortest_edge 10 is over longest_edge 5"),
    ],
)
def test_error_names_an_image_processor_that_is_not_supported(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    edit_json(folder / "preprocessor_config.json", **changes)
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_image_processor_file_of_published_checkpoints_is_enough(folder: Path) -> None:
    before = open_checkpoint(str(folder)).preprocess
    (folder / "preprocessor_config.json").write_text(json.dumps(SHORT_PROCESSOR))
    assert open_checkpoint(str(folder)).preprocess == before
    edit_json(folder / "preprocessor_config.json", rescale_factor=0.5)
    assert open_checkpoint(str(folder)).preprocess.rescale_factor == 0.5


def test_vision_configuration_of_published_checkpoints_is_enough(folder: Path) -> None:
    before = open_checkpoint(str(folder)).vision
    edit_json(folder / "config.json", vision_config__rope_parameters=...)
    edit_json(folder / "config.json", vision_config__initializer_range=0.02)
    assert open_checkpoint(str(folder)).vision == before


def test_older_names_of_the_pixel_limits_win_over_size(folder: Path) -> None:
    edit_json(folder / "preprocessor_config.json", min_pixels=1000, max_pixels=2000)
    config = open_checkpoint(str(folder)).preprocess
    assert (config.min_pixels, config.max_pixels) == (1000, 2000)


def test_processor_config_is_preferred_if_it_has_an_image_processor(folder: Path) -> None:
    nested = PROCESSOR | {"size": {"shortest_edge": 4096, "longest_edge": 8192}}
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen3VLProcessor"}))
    assert open_checkpoint(str(folder)).preprocess.max_pixels == 16777216
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": nested}))
    assert open_checkpoint(str(folder)).preprocess.max_pixels == 8192


@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json"])
@pytest.mark.parametrize("content", [None, b"{", b"[]", b"\xff\xfe", b"[" * 100000])
def test_error_names_the_file_with_broken_json(folder: Path, file: str, content: bytes | None) -> None:
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    with pytest.raises(ModelError, match=file):
        load(folder)


def test_rotary_base_is_read_from_the_checkpoint(folder: Path) -> None:
    edit_json(
        folder / "config.json", vision_config__rope_parameters={"rope_type": "axial", "rope_theta": 500.0}
    )
    assert open_checkpoint(str(folder)).vision.rope_theta == 500.0
    edit_json(folder / "config.json", vision_config__rope_parameters=...)
    assert open_checkpoint(str(folder)).vision.rope_theta == 10000.0


def test_fingerprint_depends_on_content_and_not_on_files(saved: Path, sharded: Path, tmp_path: Path) -> None:
    base = fingerprint(open_checkpoint(str(saved)))
    assert fingerprint(open_checkpoint(str(sharded))) == base
    old = save(build_model(), tmp_path / "old", old_prefix=True, processor_file="processor_config.json")
    assert fingerprint(open_checkpoint(str(old))) == base
    low = VisionEncoder.from_pretrained(str(saved), device="cpu", dtype=torch.bfloat16)
    assert low.fingerprint == base

    limited = VisionEncoder.from_pretrained(str(saved), device="cpu", max_pixels=1_000_000)
    assert limited.fingerprint != base
    weights = load_file(saved / SINGLE_FILE)
    changed = Path(shutil.copytree(saved, tmp_path / "changed"))
    edit_tensors(changed, {FC1: weights[FC1] + torch.eye(136, 96) * 1e-3})
    assert fingerprint(open_checkpoint(str(changed))) != base
    renamed = Path(shutil.copytree(saved, tmp_path / "renamed"))
    edit_json(renamed / "config.json", vision_config__deepstack_visual_indexes=[0, 3])
    assert fingerprint(open_checkpoint(str(renamed))) != base
    text = Path(shutil.copytree(saved, tmp_path / "text"))
    edit_tensors(text, {"lm_head.weight": torch.zeros(128, 40)})
    assert fingerprint(open_checkpoint(str(text))) == base

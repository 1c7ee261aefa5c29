from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from models import CudaGraphSettings, EncodeItem, ModelError, OutputSpec, Patches, VisionEncoder
from tests.support.checkpoints import build_model, relative_error, save
from tests.support.project import ROOT

SIZES = [(256, 256), (300, 500), (640, 480)]
NO_COMPILER_SCRIPT = """
import sys
import numpy as np
from models import VisionEncoder
encoder = VisionEncoder.from_pretrained("demo", device="cpu")
encoder.encode([encoder.preprocess(np.zeros((256, 256, 3), dtype=np.uint8))])
print({"torch._dynamo", "transformers"} & set(sys.modules))
"""


@pytest.fixture(scope="module")
def demo() -> VisionEncoder:
    return VisionEncoder.from_pretrained("demo", device="cpu")


def images(encoder: VisionEncoder) -> list[Patches]:
    rng = np.random.default_rng(3)
    return [encoder.preprocess(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in SIZES]


def test_demo_is_the_same_on_every_start(demo: VisionEncoder) -> None:
    again = VisionEncoder.from_pretrained("demo", device="cpu")
    assert again.fingerprint == demo.fingerprint
    assert demo.fingerprint == "4c669a3e30c021b0c3487a96061f563f5113f50209b998ed282e6d349f9a7759"
    for one, other in zip(demo.encode(images(demo)), again.encode(images(again)), strict=True):
        assert torch.equal(one, other)


def test_demo_starts_without_torchs_compiler_and_transformers() -> None:
    command = [sys.executable, "-c", NO_COMPILER_SCRIPT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"


def test_demo_vectors_of_different_images_differ(demo: VisionEncoder) -> None:
    pooled = OutputSpec(pooled=True, normalize=True, deepstack=False)
    flat = [np.full((256, 256, 3), level, dtype=np.uint8) for level in (0, 128, 255)]
    items = [EncodeItem(demo.preprocess(rgb), pooled) for rgb in flat]
    vectors = torch.stack(demo.run(items).embeddings)
    assert (vectors @ vectors.T - torch.eye(3)).abs().max() < 0.98


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16, torch.bfloat16])
def test_each_image_gets_its_requested_output(demo: VisionEncoder, dtype: torch.dtype | None) -> None:
    patches = images(demo)
    outputs = [
        OutputSpec(pooled=True, normalize=True, deepstack=False, dtype=dtype),
        OutputSpec(deepstack=True, dtype=dtype),
        OutputSpec(deepstack=False, dtype=dtype),
    ]
    result = demo.run([EncodeItem(p, o) for p, o in zip(patches, outputs, strict=True)])
    vector, tokens, main = result.embeddings
    expected = demo.encode(patches)
    mean = expected[0][:, :128].double().mean(0)
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 1e-2}.get(dtype or torch.float32, 1e-6)
    assert relative_error(vector, mean / mean.norm()) < tolerance
    assert relative_error(tokens, expected[1]) < tolerance
    assert relative_error(main, expected[2][:, :128]) < tolerance
    assert all(x.dtype == (dtype or torch.float32) and x.device.type == "cpu" for x in result.embeddings)
    assert [tuple(x.shape) for x in result.embeddings] == [(128,), (144, 384), (300, 128)]


def test_pooled_vector_without_normalize_is_the_mean(demo: VisionEncoder) -> None:
    patches = images(demo)[0]
    (vector,) = demo.run([EncodeItem(patches, OutputSpec(pooled=True, deepstack=False))]).embeddings
    assert relative_error(vector, demo.encode([patches])[0][:, :128].double().mean(0)) < 1e-6


def test_mean_is_computed_in_float32() -> None:
    encoder = VisionEncoder.from_pretrained("demo", device="cpu", dtype=torch.bfloat16)
    pooled = OutputSpec(pooled=True, deepstack=False, dtype=torch.float32)
    patches = images(encoder)
    vectors = encoder.run([EncodeItem(image, pooled) for image in patches]).embeddings
    for vector, tokens in zip(vectors, encoder.encode(patches), strict=True):
        assert relative_error(vector, tokens[:, :128].double().mean(0)) < 1e-6


@pytest.mark.parametrize("deepstack", [True, False])
def test_results_do_not_share_memory_with_the_next_replay(tmp_path: Path, deepstack: bool) -> None:
    """A model without deepstack has one level, so its buffer already has the layout of a result."""
    folder = save(build_model("qwen3_vl" if deepstack else "qwen3_5"), tmp_path)
    budgets = CudaGraphSettings(token_budgets=(64, 200), max_images_per_batch=1)
    eager, replayed = (
        VisionEncoder.from_pretrained(str(folder), device="cpu", cuda_graphs=graphs)
        for graphs in (None, budgets)
    )
    patches = images(eager)[:2]
    expected = eager.encode(patches)
    items = [EncodeItem(image, OutputSpec(deepstack=deepstack, dtype=torch.float32)) for image in patches]
    for tokens in (replayed.encode(patches), replayed.run(items).embeddings):
        for one, other in zip(tokens, expected, strict=True):
            assert relative_error(one, other) < 1e-5


def test_tokens_are_ordinary_tensors(demo: VisionEncoder) -> None:
    tokens = demo.encode(images(demo))[0]
    assert not tokens.is_inference()
    tokens.mul_(2)


def test_stats_count_images_and_tokens(demo: VisionEncoder) -> None:
    result = demo.run([EncodeItem(p, OutputSpec()) for p in images(demo)])
    [stats] = result.stats
    assert (stats.device, stats.num_images, stats.num_tokens) == ("cpu", 3, 64 + 144 + 300)
    assert (stats.hits, stats.misses, stats.replays) == (0, {"disabled": 3}, {})
    assert stats.padding_tokens == 0
    assert 0 < stats.busy_s <= result.finished_at - result.started_at


def test_several_launched_batches_can_be_awaited(demo: VisionEncoder) -> None:
    patches = images(demo)
    running = [demo.launch([EncodeItem(image, OutputSpec())]) for image in patches]
    for batch, tokens in zip(running, demo.encode(patches), strict=True):
        assert relative_error(batch.wait().embeddings[0], tokens) < 1e-6


@pytest.mark.parametrize("deepstack", [True, False])
def test_tokens_of_each_image_have_their_own_storage(demo: VisionEncoder, deepstack: bool) -> None:
    items = [EncodeItem(patches, OutputSpec(deepstack=deepstack)) for patches in images(demo)]
    for tokens in demo.run(items).embeddings:
        assert tokens.is_contiguous()
        assert tokens.untyped_storage().nbytes() == tokens.nbytes


@pytest.mark.parametrize(
    "change",
    [
        {"pixels": torch.zeros(255, 768, dtype=torch.uint8)},
        {"pixels": torch.zeros(256, 588, dtype=torch.uint8)},
        {"pixels": torch.zeros(256, 768)},
        {"pixels": torch.zeros(256, 768, dtype=torch.uint8, device="meta")},
        {"grid_thw": (1, 15, 17)},
        {"grid_thw": (2, 16, 16)},
        {"num_tokens": 65},
    ],
)
def test_patches_that_do_not_fit_the_model_are_an_error(
    demo: VisionEncoder, change: dict[str, object]
) -> None:
    fields = {"pixels": torch.zeros(256, 768, dtype=torch.uint8), "grid_thw": (1, 16, 16), "num_tokens": 64}
    assert demo.encode([Patches(**fields)])[0].shape == (64, 384)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="grid"):
        demo.encode([Patches(**(fields | change))])  # type: ignore[arg-type]


def test_pixel_limits_replace_those_of_the_checkpoint() -> None:
    encoder = VisionEncoder.from_pretrained(
        "demo", device="cpu", min_pixels=256 * 1024, max_pixels=512 * 1024
    )
    assert encoder.preprocessor.num_tokens(64, 64) == 256
    assert encoder.preprocessor.num_tokens(5000, 5000) <= 512
    with pytest.raises(ModelError, match="min_pixels 2000000 is over max_pixels 1048576"):
        VisionEncoder.from_pretrained("demo", device="cpu", min_pixels=2_000_000)


def test_missing_device_is_an_error() -> None:
    with pytest.raises(ModelError, match="device 'cuda:99' is not here"):
        VisionEncoder.from_pretrained("demo", device="cuda:99")


def test_properties_follow_from_the_checkpoint(tmp_path: Path) -> None:
    folder = save(build_model("qwen3_vl"), tmp_path)
    encoder = VisionEncoder.from_pretrained(str(folder), device="cpu", dtype=torch.bfloat16)
    assert (encoder.hidden_size, encoder.width, encoder.num_deepstack) == (40, 120, 2)
    assert encoder.dtype == torch.bfloat16
    assert encoder.attn_backend == "TORCH_SDPA"
    assert encoder.revision is None
    assert {p.dtype for p in encoder.model.parameters()} == {torch.bfloat16}


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    folder = save(build_model("qwen3_vl"), tmp_path)
    exact, rounded = (
        VisionEncoder.from_pretrained(str(folder), device="cpu", dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    batch = images(exact)
    for one, other in zip(exact.encode(batch), rounded.encode(batch), strict=True):
        assert relative_error(other, one) < 0.02


def test_fingerprint_is_a_sha256() -> None:
    fingerprint = VisionEncoder.from_pretrained("demo", device="cpu").fingerprint
    assert len(bytes.fromhex(fingerprint)) == hashlib.sha256().digest_size

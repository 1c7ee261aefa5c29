"""Checkpoints of the hub, and the memory of loading."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from models import ModelError
from models.weights import INDEX_FILE, SINGLE_FILE, fingerprint, open_checkpoint
from tests.support.checkpoints import build_model, save


class FakeHub:
    """Copies matching files from a folder to a snapshot, as the hub client does."""

    def __init__(self, source: Path, target: Path) -> None:
        self.source, self.snapshot, self.asked = source, target / ("c0ffee" * 6), list[tuple[Any, ...]]()

    def __call__(self, repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        self.asked.append((repo_id, revision, tuple(allow_patterns)))
        self.snapshot.mkdir(exist_ok=True)
        for name in allow_patterns:
            if (self.source / name).exists():
                shutil.copy(self.source / name, self.snapshot)
        return str(self.snapshot)


def test_only_needed_files_of_a_hub_repository_are_downloaded(sharded: Path, tmp_path: Path) -> None:
    hub = FakeHub(sharded, tmp_path)
    checkpoint = open_checkpoint("org/model", "main", download=hub)
    assert checkpoint.revision == "c0ffee" * 6
    assert fingerprint(checkpoint) == fingerprint(open_checkpoint(str(sharded)))
    (_, first_revision, first), (_, second_revision, second) = hub.asked
    assert (first_revision, second_revision) == ("main", checkpoint.revision)
    assert all(name.endswith(".json") for name in first)
    weight_map = json.loads((sharded / INDEX_FILE).read_text())["weight_map"]
    assert set(second) == {file for name, file in weight_map.items() if ".visual." in name}


def test_hub_repository_with_one_weight_file_loads(saved: Path, tmp_path: Path) -> None:
    hub = FakeHub(saved, tmp_path)
    assert open_checkpoint("org/model", download=hub).revision == hub.snapshot.name
    assert hub.asked[1][2] == (SINGLE_FILE,)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RepositoryNotFoundError, "neither a folder nor a repository on the hub"),
        (RevisionNotFoundError, "has no revision 'v9'"),
        (GatedRepoError, "is gated: .*HF_TOKEN"),
        (httpx.ConnectTimeout, "could not be downloaded: reason"),  # of the HTTP library
        (OSError, "could not be downloaded: reason"),  # of the file system
        (ValueError, "could not be downloaded: reason"),
        (RuntimeError, "could not be downloaded: reason"),  # of hf_xet
    ],
)
def test_hub_errors_are_one_clear_line(error: type[Exception], message: str) -> None:
    def download(repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        if not issubclass(error, HfHubHTTPError):
            raise error("reason\nmore")
        response = httpx.Response(404, request=httpx.Request("GET", "https://hub.invalid"))
        raise error("text\nmore", response=response)

    with pytest.raises(ModelError, match=message) as caught:
        open_checkpoint("org/model", "v9", download=download)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "~/nothing"])
def test_path_is_not_looked_up_on_the_hub(model: str) -> None:
    def download(repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        raise AssertionError("asked the hub")

    with pytest.raises(ModelError, match="is not a folder"):
        open_checkpoint(model, download=download)


MEMORY_SCRIPT = """
import sys, threading, time
import torch
from models import VisionEncoder
from transformers import CONFIG_MAPPING

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def load(dtype):
    # Prints the bytes of the weights, and by how much memory grew at most.
    before, peak, done = anonymous(), 0, False

    def watch():
        nonlocal peak
        while not done:
            peak = max(peak, anonymous())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    encoder = VisionEncoder.from_pretrained(sys.argv[1], device="cpu", dtype=dtype)
    done = True
    watcher.join()
    print(sum(p.numel() * p.element_size() for p in encoder.model.parameters()), peak - before)
    return encoder

# Memory that the first use of a library allocates does not count.
VisionEncoder.from_pretrained("demo", device="cpu")
CONFIG_MAPPING["qwen3_vl"]
# Both encoders stay, so that the second cannot use memory of the first.
encoders = [load(dtype) for dtype in (torch.float32, torch.bfloat16)]
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build_model(hidden_size=768, intermediate_size=3072, depth=3, num_heads=12, out_hidden_size=512)
    return save(model, tmp_path_factory.mktemp("large"), shard_size="40MB")


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's /proc")
def test_loading_needs_little_more_memory_than_the_weights(large: Path) -> None:
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(large)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    sizes = [[int(x) for x in line.split()] for line in done.stdout.splitlines()]
    assert len(sizes) == 2
    for weights, peak in sizes:
        assert weights > 100e6
        assert peak <= 1.3 * weights

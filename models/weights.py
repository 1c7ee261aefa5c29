"""Finds the files of a checkpoint, reads the encoder's tensors and computes the fingerprint.

Only safetensors are read, so loading runs no code of the checkpoint. If a checkpoint is sharded, only the
shards that hold the encoder are downloaded and opened. Knows nothing of the forward pass.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import httpx
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open

from models.config import PROCESSOR_FILES, VisionConfig, read_json, read_preprocess_config, read_vision_config
from models.errors import ModelError
from models.preprocess import PreprocessConfig

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PREFIXES = ("model.visual.", "visual.")  # newer and older checkpoints
FINGERPRINT_VERSION = 1  # increase it when a change gives other vectors for the same checkpoint and image
# Of the file system (a full disk), of the HTTP library, for arguments, and of hf_xet, which transfers large
# files.
DOWNLOAD_ERRORS = (OSError, httpx.HTTPError, ValueError, RuntimeError)


class Tensors(Protocol):
    """The encoder's tensors, as the checkpoint stores them. Names have no prefix."""

    def names(self) -> Sequence[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def get(self, name: str) -> torch.Tensor:
        """Returns a tensor on the CPU. It may be a view of the mapped file: do not write to it."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """Everything that the encoder is built from."""

    vision: VisionConfig
    preprocess: PreprocessConfig
    tensors: Tensors
    revision: str | None  # commit on the hub; None for a folder


class Download(Protocol):
    """Downloads the matching files of a hub repository."""

    def __call__(self, repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        """Returns the folder of the files."""
        ...


def open_checkpoint(
    model: str, revision: str | None = None, download: Download = snapshot_download
) -> Checkpoint:
    """Opens a local folder or a hub repository. Raises `ModelError` if it cannot be served."""
    if Path(model).is_dir():
        return _open_folder(Path(model), revision=None)
    if model.startswith(("/", ".", "~")):
        raise ModelError(f"model {model!r} is not a folder")
    folder = _download(download, model, revision, ["config.json", INDEX_FILE, *PROCESSOR_FILES])
    commit = folder.name
    shards = _encoder_shards(folder)
    folder = _download(download, model, commit, shards)
    return _open_folder(folder, revision=commit)


def _download(download: Download, model: str, revision: str | None, files: list[str]) -> Path:
    at = f"{model}@{revision}" if revision else model
    logger.info("fetching %s of %s", ", ".join(files), at)
    try:
        return Path(download(model, revision=revision, allow_patterns=files))
    except GatedRepoError:
        raise ModelError(f"model {model!r} is gated: accept its terms on the hub and set HF_TOKEN") from None
    except RevisionNotFoundError:
        raise ModelError(f"model {model!r} has no revision {revision!r}") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ModelError(f"model {model!r} is neither a folder nor a repository on the hub") from None
    except DOWNLOAD_ERRORS as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"model {model!r} could not be downloaded: {reason}") from None


def _open_folder(folder: Path, revision: str | None) -> Checkpoint:
    vision = read_vision_config(folder)
    preprocess = read_preprocess_config(folder, vision)
    return Checkpoint(vision, preprocess, SafetensorsFiles(folder, _encoder_shards(folder)), revision)


def _encoder_shards(folder: Path) -> list[str]:
    """Returns the names of the files that hold the encoder's tensors."""
    if not (folder / INDEX_FILE).exists():
        return [SINGLE_FILE]
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{INDEX_FILE} has no weight_map")
    shards = sorted({str(file) for name, file in weight_map.items() if name.startswith(PREFIXES)})
    if not shards:
        raise ModelError(f"{INDEX_FILE} has no vision encoder: no tensor starts with {' or '.join(PREFIXES)}")
    for shard in shards:
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(f"{INDEX_FILE} names {shard!r}, which is not a safetensors file in its folder")
    return shards


class SafetensorsFiles:
    """The encoder's tensors in one or more safetensors files of a folder."""

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        self._handles: dict[str, tuple[safe_open, str]] = {}  # by name without prefix: file, and full name
        for file in files:
            handle = _open_file(folder / file)
            for key in handle.keys():  # noqa: SIM118 - not a dictionary
                prefix = next((prefix for prefix in PREFIXES if key.startswith(prefix)), None)
                if prefix is None:
                    continue
                if self._handles.setdefault(key.removeprefix(prefix), (handle, key)) != (handle, key):
                    raise ModelError(f"{file}: the checkpoint has tensor {key} twice")
        if not self._handles:
            raise ModelError(
                f"{', '.join(files)}: no vision encoder: no tensor starts with {' or '.join(PREFIXES)}"
            )

    def names(self) -> Sequence[str]:
        return sorted(self._handles)

    def shape(self, name: str) -> tuple[int, ...]:
        handle, key = self._handles[name]
        return tuple(handle.get_slice(key).get_shape())

    def get(self, name: str) -> torch.Tensor:
        handle, key = self._handles[name]
        tensor: torch.Tensor = handle.get_tensor(key)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ModelError(f"tensor {key} is {tensor.dtype}: quantized encoders are not supported")
        return tensor


def _open_file(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        hint = " (only safetensors are read)" if path.name == SINGLE_FILE else ""
        raise ModelError(f"the checkpoint has no {path.name}{hint}") from None
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path.name} cannot be read: {error}") from None


def check_tensors(tensors: Tensors, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `ModelError` with the first missing, unexpected or misshapen tensors, if there are any."""
    found = set(tensors.names())
    problems = [f"missing {name}" for name in sorted(expected.keys() - found)]
    problems += [f"unexpected {name}" for name in sorted(found - expected.keys())]
    problems += [
        f"{name} is {list(tensors.shape(name))}, not {list(expected[name])}"
        for name in sorted(found & expected.keys())
        if tensors.shape(name) != expected[name]
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ModelError(f"the encoder's tensors do not fit config.json: {'; '.join(problems[:5])}{more}")


def fingerprint(checkpoint: Checkpoint) -> str:
    """Returns 64 hex digits. Vectors may be compared if their fingerprints are equal.

    SHA-256 over the stored weights, the vision configuration and the preprocessing with its limits. File
    names, shards, prefixes, devices, backends and the dtype of the computation do not change it.
    """
    shape = {"vision": asdict(checkpoint.vision), "preprocess": asdict(checkpoint.preprocess)}
    digest = hashlib.sha256(json.dumps([FINGERPRINT_VERSION, shape], sort_keys=True).encode())
    for line in _tensor_digests(checkpoint.tensors):
        digest.update(line.encode())
    return digest.hexdigest()


def _tensor_digests(tensors: Tensors) -> Iterator[str]:
    def of(name: str) -> str:
        tensor = tensors.get(name)
        content = hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        return f"{name} {tensor.dtype} {list(tensor.shape)} {content.hexdigest()}\n"

    with ThreadPoolExecutor(thread_name_prefix="fingerprint") as pool:
        yield from pool.map(of, tensors.names())

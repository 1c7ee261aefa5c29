"""A connector for vLLM that loads image tokens from vision-sidecar. The file needs nothing but vLLM.

    PYTHONPATH=deploy/vllm vllm serve MODEL --ec-transfer-config '{"ec_connector": "VisionSidecarConnector",
        "ec_connector_module_path": "vision_sidecar_connector", "ec_role": "ec_consumer",
        "ec_connector_extra_config": {"dir": "/dev/shm/vision-sidecar/tokens"}}'

A chat request then names an image by its uuid and its grid alone. The extra configuration has these members:

    dir           the store of a vision-sidecar on this host (its --handoff-dir)
    url           in place of `dir`: a vision-sidecar on another host, such as http://sidecar:8080
    api_key_file  with `url`: a file with its API key
    timeout_s     with `url`: longest time in seconds to fetch the tokens of one image [10]
    threads       with `url`: fetches at the same time [8]
    keep_bytes    bytes of tokens that stay open here between requests [1 GiB]

The scheduler opens the tokens of a request before it schedules the request. They are an open file: of the
store, or of memory if they were fetched. So the store may drop them at any time. Workers open the same file
through the scheduler's process, so they must run on its host. If tokens cannot be had or do not fit, only
their request fails. The log says why; vLLM answers 500 without the reason.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from io import FileIO
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, build_opener

import torch
from vllm import __version__ as vllm_version
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats
from vllm.logger import init_logger

logger = init_logger("vllm.vision_sidecar_connector")

SUPPORTED_VERSIONS = ("0.32",)

_UUID = re.compile(r"vs1-[0-9a-f]{64}")  # only what matches as a whole becomes part of a path or a URL
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_HEADER_BYTES = 2**16
_CHUNK_BYTES = 2**20
_STAGING_BYTES = 2**25  # of each of two pinned buffers
# A file that a step loads stays open for this many later steps. vLLM plans few steps ahead of its workers.
_OPEN_STEPS = 16
_PAUSE_S = 0.001  # for the engine's loop, which would spin while a request is deferred
_FAILURES = ("not_found", "misfit", "timeout", "unreachable", "invalid_uuid", "other")


class Unavailable(Exception):
    """Tokens that cannot be had. `reason` is one of `_FAILURES`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Config:
    """The extra configuration, checked."""

    dir: str | None = None
    url: str | None = None
    api_key_file: str | None = None
    timeout_s: float = 10.0
    threads: int = 8
    keep_bytes: int = 2**30

    @classmethod
    def parse(cls, extra: dict[str, Any]) -> Config:
        """Raises `ValueError` with one line."""
        unknown = sorted(set(extra) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(f"VisionSidecarConnector has no setting {unknown[0]!r}")
        config = cls(**extra)
        if (config.dir is None) == (config.url is None):
            raise ValueError("VisionSidecarConnector needs either `dir` or `url`")
        if config.dir is not None and not os.path.isabs(config.dir):
            raise ValueError("`dir` of VisionSidecarConnector is not an absolute path")
        parts = urlsplit(config.url or "http://x")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("`url` of VisionSidecarConnector is not an http or https URL of a server")
        for name in ("timeout_s", "threads", "keep_bytes"):
            value = getattr(config, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ValueError(f"`{name}` of VisionSidecarConnector is not a positive number")
        return config


@dataclass(frozen=True)
class Tokens:
    """Tokens in an open file: from `offset` on, rows of `shape`."""

    file: int
    offset: int
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.dtype.itemsize


def read_header(file: int) -> Tokens:
    """The tokens in a safetensors file with the tensor `tokens`. Raises `Unavailable`."""
    try:
        length = int.from_bytes(os.pread(file, 8, 0), "little")
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise ValueError("no header")
        entry = json.loads(os.pread(file, length, 8))["tokens"]
        rows, width = entry["shape"]
        begin, _ = entry["data_offsets"]
        tokens = Tokens(file, 8 + length + begin, (int(rows), int(width)), _DTYPES[entry["dtype"]])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unavailable("misfit", f"not a file of tokens: {error!r}") from None
    if begin != 0 or tokens.offset + tokens.num_bytes != os.fstat(file).st_size:
        raise Unavailable("misfit", "the file of tokens is not whole")
    return tokens


class Folder:
    """The store of a vision-sidecar on this host."""

    def __init__(self, config: Config) -> None:
        self._folder = config.dir

    def open(self, uuid: str, num_bytes: int) -> int:
        """Opens the file of an image. Raises `Unavailable`, `OSError`."""
        try:
            return os.open(f"{self._folder}/{uuid}.safetensors", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Unavailable("not_found", "the store does not have it") from None


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any) -> None:
        """A redirect is an error: it could lead anywhere."""


class Server:
    """A vision-sidecar on another host. Proxies of the environment are not used."""

    def __init__(self, config: Config) -> None:
        self._url = (config.url or "").rstrip("/")
        self._timeout_s = config.timeout_s
        self._opener = build_opener(ProxyHandler({}), _NoRedirects)
        self._opener.addheaders = [("User-Agent", "vision-sidecar-connector")]
        if config.api_key_file is not None:
            key = Path(config.api_key_file).read_text().strip()
            self._opener.addheaders.append(("Authorization", f"Bearer {key}"))

    def open(self, uuid: str, num_bytes: int) -> int:
        """Fetches the file of an image, of at most `num_bytes`, into memory. Raises `Unavailable`."""
        file = os.memfd_create("vision-sidecar", os.MFD_CLOEXEC)
        try:
            self._fetch(f"{self._url}/handoff/{uuid}", file, num_bytes)
        except BaseException as error:
            os.close(file)
            if isinstance(error, HTTPError):
                reason = "not_found" if error.code == 404 else "other"
                raise Unavailable(reason, f"the server answered {error.code}") from None
            if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
                raise Unavailable("timeout", f"it did not arrive within {self._timeout_s:g} s") from None
            if isinstance(error, OSError | HTTPException):
                raise Unavailable("unreachable", repr(error)) from None
            raise
        return file

    def _fetch(self, url: str, file: int, num_bytes: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        with self._opener.open(url, timeout=self._timeout_s) as response:
            while chunk := response.read(_CHUNK_BYTES):
                num_bytes -= len(chunk)
                if num_bytes < 0:
                    raise Unavailable("misfit", "the file is larger than the tokens of this image")
                if time.monotonic() > deadline:
                    raise TimeoutError
                os.write(file, chunk)


@dataclass
class Loads(ECConnectorMetadata):
    """What the workers load in one step: for each uuid the path of a file, and its tokens."""

    tokens: dict[str, tuple[str, Tokens]] = field(default_factory=dict)


@dataclass
class Stats(ECConnectorStats):
    """Counts since the last report: `loads`, `bytes`, and failures by their reason."""

    def count(self, name: str, number: int = 1) -> None:
        self.data[name] = self.data.get(name, 0) + number

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: ECConnectorStats) -> Stats:
        for name, number in other.data.items():
            self.count(name, number)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(ECConnectorPromMetrics):
    """Counters on vLLM's own page of metrics."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, values: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, values)

        def counter(name: str, text: str, *labels: str) -> Any:
            return self._counter_cls(f"vllm:vision_sidecar_{name}", text, labelnames=[*labelnames, *labels])

        images = counter("images", "Images whose tokens were loaded.")
        size = counter("bytes", "Bytes of these tokens.")
        failures = counter("failures", "Images whose tokens could not be had.", "reason")
        self._counters = {
            engine: {"loads": images.labels(*labels), "bytes": size.labels(*labels)}
            | {reason: failures.labels(*labels, reason) for reason in _FAILURES}
            for engine, labels in values.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, number in transfer_stats_data.items():
            self._counters[engine_idx][name].inc(number)


class VisionSidecarConnector(ECConnectorBase):
    """vLLM makes one in its scheduler and one in each worker, and calls each from one thread."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        if not vllm_version.startswith(tuple(f"{version}." for version in SUPPORTED_VERSIONS)):
            supported = ", ".join(SUPPORTED_VERSIONS)
            raise ValueError(f"VisionSidecarConnector supports vLLM {supported}, not {vllm_version}")
        if not self.is_consumer or self.is_producer:
            raise ValueError('VisionSidecarConnector needs "ec_role": "ec_consumer"')
        config = Config.parse(vllm_config.ec_transfer_config.ec_connector_extra_config)
        vision = vllm_config.model_config.hf_config.vision_config
        levels = getattr(vision, "deepstack_visual_indexes", None) or ()
        self._width: int = vision.out_hidden_size * (1 + len(levels))
        self._dtype: torch.dtype = vllm_config.model_config.dtype
        self._stats = Stats()
        if role is ECConnectorRole.SCHEDULER:
            self._source: Folder | Server = Folder(config) if config.dir is not None else Server(config)
            self._keep_bytes = config.keep_bytes
            self._threads = ThreadPoolExecutor(int(config.threads), "vision-sidecar")
            self._opening: dict[tuple[str, int], Future[Tokens]] = {}
            self._open: OrderedDict[str, Tokens] = OrderedDict()  # least recently needed first
            self._needed_at: dict[str, int] = {}  # the step in which each open file was needed last
            self._step = 0
            self._failed: set[str] = set()
            self._loads = Loads()
        else:
            self._staging = _Staging()

    # The scheduler's side

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether the tokens of all images that the request still needs are open."""
        is_ready = True
        for index, feature in enumerate(request.mm_features):
            place = feature.mm_position
            is_computed = place.offset + place.length <= num_computed_tokens
            if is_computed or _brings_its_data(feature):
                continue
            try:
                is_ready &= self._is_open(feature.identifier, request.get_num_encoder_embeds(index))
            except Unavailable as error:
                self._fail(request.request_id, feature.identifier, error)
                is_ready = False
        if not is_ready:
            time.sleep(_PAUSE_S)
        return is_ready

    def _is_open(self, uuid: str, num_tokens: int) -> bool:
        """False while the tokens are being opened. Raises `Unavailable`."""
        found = self._open.get(uuid)
        if found is not None and found.shape[0] == num_tokens:
            self._open.move_to_end(uuid)
            self._needed_at[uuid] = self._step
            return True
        if not _UUID.fullmatch(uuid):
            raise Unavailable("invalid_uuid", "not the uuid of an image of vision-sidecar")
        opening = self._opening.get((uuid, num_tokens))
        if opening is None:
            self._opening[uuid, num_tokens] = self._threads.submit(self._fetch, uuid, num_tokens)
            return False
        if not opening.done():
            return False
        del self._opening[uuid, num_tokens]
        try:
            tokens = opening.result()
        except OSError as error:
            raise Unavailable("other", repr(error)) from None
        self._close(uuid)
        self._open[uuid] = tokens
        self._needed_at[uuid] = self._step
        return True

    def _fetch(self, uuid: str, num_tokens: int) -> Tokens:
        """Runs in a thread. Raises `Unavailable` and `OSError`."""
        most_bytes = 8 + _MAX_HEADER_BYTES + num_tokens * self._width * 4
        file = self._source.open(uuid, most_bytes)
        try:
            tokens = read_header(file)
            if tokens.shape != (num_tokens, self._width):
                here = num_tokens, self._width
                raise Unavailable("misfit", f"its tokens are {tokens.shape}, not {here} as here")
        except BaseException:
            os.close(file)
            raise
        return tokens

    def _fail(self, request_id: str, uuid: str, error: Unavailable) -> None:
        if request_id not in self._failed:
            self._failed.add(request_id)
            self._stats.count(error.reason)
            logger.error("request %s fails: the tokens of image %s: %s", request_id, ascii(uuid[:80]), error)

    def take_unavailable_requests(self) -> set[str]:
        """The requests that vLLM is to fail."""
        failed, self._failed = self._failed, set()
        return failed

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the workers can load the tokens."""
        return identifier in self._open

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Has the workers load the tokens in this step."""
        feature = request.mm_features[index]
        tokens = self._open.get(feature.identifier)
        if tokens is not None and not _brings_its_data(feature):
            path = f"/proc/{os.getpid()}/fd/{tokens.file}"
            self._loads.tokens[feature.identifier] = path, tokens
            self._needed_at[feature.identifier] = self._step
            self._stats.count("loads")
            self._stats.count("bytes", tokens.num_bytes)

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        """What the workers load in this step. Closes files that no step needs any more."""
        loads, self._loads = self._loads, Loads()
        self._step += 1
        num_bytes = sum(tokens.num_bytes for tokens in self._open.values())
        for uuid in list(self._open):
            if num_bytes <= self._keep_bytes or self._needed_at[uuid] >= self._step - _OPEN_STEPS:
                break
            num_bytes -= self._open[uuid].num_bytes
            self._close(uuid)
        return loads

    def _close(self, uuid: str) -> None:
        tokens = self._open.pop(uuid, None)
        if tokens is not None:
            os.close(tokens.file)
            del self._needed_at[uuid]

    def shutdown(self) -> None:
        """Ends the threads and closes all files."""
        if self.role is ECConnectorRole.SCHEDULER:
            self._threads.shutdown(wait=False, cancel_futures=True)
            for uuid in list(self._open):
                self._close(uuid)

    # A worker's side

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Loads the tokens of this step. On CUDA the copies run while the host goes on."""
        loads = self._get_connector_metadata()
        assert isinstance(loads, Loads)
        for uuid, (path, tokens) in loads.tokens.items():
            if uuid not in encoder_cache:
                encoder_cache[uuid] = self._staging.load(path, tokens).to(self._dtype)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Does nothing: vision-sidecar makes the tokens."""

    # Metrics

    def get_ec_connector_stats(self) -> Stats | None:
        """The counts since the last call."""
        stats, self._stats = self._stats, Stats()
        return stats

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Counts from their plain form."""
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> PromMetrics:
        """Registers the counters."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _brings_its_data(feature: Any) -> bool:
    """Whether the request itself holds the image, or its tokens."""
    data = feature.data
    if data is None:
        return False
    embeds = data.get("image_embeds")
    return "pixel_values" in data or (embeds is not None and embeds.data is not None)


class _Staging:
    """Reads files into tensors on the worker's device; on CUDA through two pinned buffers in turn."""

    def __init__(self) -> None:
        from vllm.platforms import current_platform

        self._device = torch.device(current_platform.device_type)
        self._buffers: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._turn = 0

    def load(self, path: str, tokens: Tokens) -> torch.Tensor:
        """The tokens [num_tokens, width]. Raises `OSError` if the file is shorter than it was."""
        result = torch.empty(tokens.shape, dtype=tokens.dtype, device=self._device)
        rows = result.view(torch.uint8).view(-1)
        with FileIO(path) as file:
            file.seek(tokens.offset)
            (self._read_staged if self._device.type == "cuda" else _read)(file, rows)
        return result

    def _read_staged(self, file: FileIO, rows: torch.Tensor) -> None:
        if not self._buffers:
            self._buffers = [torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in "12"]
            self._copied = [torch.cuda.Event(), torch.cuda.Event()]
        for part in rows.split(_STAGING_BYTES):
            self._turn = 1 - self._turn
            self._copied[self._turn].synchronize()  # the copy before the last one has read the buffer
            staged = self._buffers[self._turn][: len(part)]
            _read(file, staged)
            part.copy_(staged, non_blocking=True)
            self._copied[self._turn].record()


def _read(file: FileIO, target: torch.Tensor) -> None:
    """Fills a tensor of bytes on the host."""
    left = memoryview(target.numpy())
    while len(left):
        num_bytes = file.readinto(left)
        if not num_bytes:
            raise OSError("the file of tokens has become shorter")
        left = left[num_bytes:]

"""A connector for vLLM that loads image tokens from vision-sidecar. The file needs nothing but vLLM.

    PYTHONPATH=deploy/vllm vllm serve MODEL --ec-transfer-config '{"ec_connector": "VisionSidecarConnector",
        "ec_connector_module_path": "vision_sidecar_connector", "ec_role": "ec_consumer",
        "ec_connector_extra_config": {"dir": "/dev/shm/vision-sidecar/tokens"}}'

A chat request then names an image by its uuid and its grid alone. The extra configuration has these members:

    dir           the store of a vision-sidecar on this host (its --handoff-dir)
    url           in place of `dir`: a vision-sidecar on another host, such as http://sidecar:8080
    api_key_file  with `url`: a file with its API key
    timeout_s     with `url`: longest time in seconds to fetch the tokens of one image [10]
    max_bytes     tokens that are held here for waiting requests, in bytes; a single one may need more [1 GiB]

The scheduler opens the tokens of a request before it schedules the request. They are an open file: of the
store, or of memory if they were fetched. So the store may drop them at any time. Workers open the same file
through the scheduler's process, so they must run on its host. If tokens cannot be had or do not fit, only
their request fails. The log says why; vLLM answers 500 without the reason.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import torch
from urllib3.exceptions import HTTPError, ReadTimeoutError
from vllm import __version__ as vllm_version
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats
from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger("vllm.vision_sidecar_connector")

SUPPORTED_VERSIONS = ("0.32",)

_UUID = re.compile(r"vs1-[0-9a-f]{64}")  # only what matches as a whole becomes part of a path or a URL
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_HEADER_BYTES = 2**16
_MAX_GRIDS = 2**16
_NUM_THREADS = 8
_PART_BYTES = 2**22  # read or fetched in one call
_PAUSE_S = 0.001  # of the engine's loop, which would spin while all requests wait for tokens
_FAILURES = ("not_found", "misfit", "timeout", "unreachable", "invalid_uuid", "other")


class Unavailable(Exception):
    """Tokens that cannot be had. `reason` is one of `_FAILURES`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Tokens:
    """Tokens in an open file: from `offset` on, rows of `shape`."""

    file: int
    offset: int
    shape: tuple[int, int]
    dtype: torch.dtype
    grid: tuple[int, ...]  # of patches, before the spatial merge

    @classmethod
    def read(cls, file: int) -> Tokens:
        """Reads the header of a file of the store. Raises `Unavailable`."""
        try:
            length = int.from_bytes(os.pread(file, 8, 0), "little")
            if not 0 < length <= _MAX_HEADER_BYTES:
                raise ValueError("no header")
            header = json.loads(os.pread(file, length, 8))
            entry, grid = header["tokens"], tuple(json.loads(header["__metadata__"]["grid_thw"]))
            (rows, width), (begin, end) = map(int, entry["shape"]), map(int, entry["data_offsets"])
            tokens = cls(file, 8 + length, (rows, width), _DTYPES[entry["dtype"]], grid)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Unavailable("misfit", f"not a file of tokens: {error!r}") from None
        if begin != 0 or end != tokens.num_bytes or 8 + length + end != os.fstat(file).st_size:
            raise Unavailable("misfit", "the file of tokens is not whole")
        return tokens

    @property
    def num_bytes(self) -> int:
        rows, width = self.shape
        return rows * width * int(self.dtype.itemsize)


@dataclass(frozen=True)
class Source:
    """Where tokens come from: the extra configuration, checked."""

    dir: str | None = None
    url: str | None = None
    api_key_file: str | None = None
    timeout_s: float = 10.0
    max_bytes: int = 2**30

    def __post_init__(self) -> None:
        """Raises `ValueError` with one line."""
        if (self.dir is None) == (self.url is None):
            raise ValueError("VisionSidecarConnector needs either `dir` or `url`")
        if self.dir is not None and not os.path.isabs(self.dir):
            raise ValueError("`dir` of VisionSidecarConnector is not an absolute path")
        parts = urlsplit(self.url or "http://x")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("`url` of VisionSidecarConnector is not an http or https URL of a server")
        for name in ("timeout_s", "max_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ValueError(f"`{name}` of VisionSidecarConnector is not a positive number")

    def open(self, uuid: str, num_bytes: int) -> int:
        """Opens the file of an image, which has at most `num_bytes`. Raises `Unavailable` and `OSError`."""
        if self.dir is None:
            return self._fetch(uuid, num_bytes)
        try:
            return os.open(f"{self.dir}/{uuid}.safetensors", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Unavailable("not_found", "the store does not have it") from None

    def _fetch(self, uuid: str, num_bytes: int) -> int:
        """Fetches the file into memory."""
        file = os.memfd_create("vision-sidecar", os.MFD_CLOEXEC)
        try:
            self._download(f"{(self.url or '').rstrip('/')}/handoff/{uuid}", file, num_bytes)
        except BaseException as error:
            os.close(file)
            if isinstance(error, requests.Timeout | ReadTimeoutError | TimeoutError):
                raise Unavailable("timeout", f"it did not arrive within {self.timeout_s:g} s") from None
            if isinstance(error, requests.RequestException | HTTPError):
                raise Unavailable("unreachable", repr(error)) from None
            raise
        return file

    def _download(self, url: str, file: int, num_bytes: int) -> None:
        """Follows no redirects, which could lead anywhere, and uses no proxies of the environment."""
        deadline = time.monotonic() + self.timeout_s
        headers = {"Accept-Encoding": "identity"}
        if self.api_key_file is not None:  # read anew, so that the key can be changed
            headers["Authorization"] = f"Bearer {Path(self.api_key_file).read_text().strip()}"
        options: dict[str, Any] = {"timeout": self.timeout_s, "stream": True, "allow_redirects": False}
        with requests.Session() as session:
            session.trust_env = False
            with session.get(url, headers=headers, **options) as response:
                if response.status_code != 200:
                    reason = "not_found" if response.status_code == 404 else "other"
                    raise Unavailable(reason, f"the server answered {response.status_code}")
                while chunk := response.raw.read1(_PART_BYTES):
                    num_bytes -= len(chunk)
                    if num_bytes < 0:
                        raise Unavailable("misfit", "the file is larger than the tokens of this image")
                    if time.monotonic() > deadline:
                        raise TimeoutError
                    os.write(file, chunk)


@dataclass
class Item:
    """Tokens that are being opened, or are open, for some requests."""

    opening: Future[Tokens]
    num_bytes: int
    users: set[str] = field(default_factory=set)  # ids of requests that have not computed the image yet
    used_at: int = 0  # the last step with a user

    @property
    def tokens(self) -> Tokens | None:
        """None while they are being opened, and if they cannot be had."""
        is_open = self.opening.done() and not self.opening.cancelled() and not self.opening.exception()
        return self.opening.result() if is_open else None


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
        self.data.clear()

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
        failures = counter("failures", "Requests that failed for want of tokens.", "reason")
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
        extra = vllm_config.ec_transfer_config.ec_connector_extra_config
        unknown = sorted(set(extra) - set(Source.__dataclass_fields__))
        if unknown:
            raise ValueError(f"VisionSidecarConnector has no setting {unknown[0]!r}")
        self._source = Source(**extra)
        vision = vllm_config.model_config.hf_config.vision_config
        levels = getattr(vision, "deepstack_visual_indexes", None) or ()
        self._width: int = vision.out_hidden_size * (1 + len(levels))
        self._dtype: torch.dtype = vllm_config.model_config.dtype
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "vision-sidecar")
        self._stats = Stats()
        if role is ECConnectorRole.SCHEDULER:
            self._items: dict[tuple[str, int], Item] = {}  # by uuid and number of tokens
            self._step = 0
            # Files are kept open for so many steps after their last use: workers may be some steps behind.
            self._open_steps = 4 + 2 * vllm_config.parallel_config.pipeline_parallel_size
            self._first_waiting = ""  # the id of the first request in this step that has to wait
            self._failed: set[str] = set()  # ids of requests that are to fail, until they end
            self._ends: dict[str, int] = {}  # where the last image ends, of requests that have computed all
            self._grids: dict[str, tuple[int, ...]] = {}  # of images that were opened
            self._loads = Loads()
        else:
            self._device = torch.device(current_platform.device_type)
            self._buffers: list[tuple[torch.Tensor, torch.cuda.Event]] = []  # pinned; when last copied from

    # The scheduler's side

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether the tokens of all images that the request still needs are open."""
        if num_computed_tokens >= self._ends.get(request.request_id, sys.maxsize):
            return True  # at every step of an answer
        is_ready, num_open = True, 0
        for index, feature in enumerate(request.mm_features):
            key = feature.identifier, request.get_num_encoder_embeds(index)
            if _brings_its_data(feature):
                self._check_data(feature, key[1], request.request_id)
            elif _end(feature) <= num_computed_tokens:
                self._drop_user(key, request.request_id)
                self._check_grid(request.request_id, feature)
            elif request.request_id not in self._failed:
                is_ready &= self._is_open(key, request.request_id, feature)
                num_open += 1
        if not num_open:
            self._ends[request.request_id] = max(map(_end, request.mm_features))
        return is_ready and request.request_id not in self._failed

    def _check_data(self, feature: Any, num_tokens: int, request_id: str) -> None:
        """Fails a request whose own data would end the engine, or be taken for an image of the store."""
        embeds = feature.data.get("image_embeds")
        shape = None if embeds is None or embeds.data is None else tuple(embeds.data.shape)
        if _UUID.fullmatch(feature.identifier):
            error = Unavailable("invalid_uuid", "the chat has data of its own under a uuid of vision-sidecar")
        elif shape is not None and shape != (num_tokens, self._width):
            error = Unavailable("misfit", f"its own tokens are {shape}, not {(num_tokens, self._width)}")
        else:
            return
        self._fail(request_id, feature.identifier, error)

    def _check_grid(self, request_id: str, feature: Any) -> bool:
        """Fails a request with a wrong grid: what it computes would be kept for those with the right one."""
        grid = tuple(feature.data["image_grid_thw"].data.flatten().tolist())
        known = self._grids.get(feature.identifier, grid)
        if known != grid:
            self._fail(
                request_id, feature.identifier, Unavailable("misfit", f"its grid is {known}, not {grid}")
            )
        return known == grid

    def _is_open(self, key: tuple[str, int], request_id: str, feature: Any) -> bool:
        """Whether the tokens are open. If they cannot be had or do not fit, the request fails."""
        item = None
        try:
            item = self._items.get(key) or self._start(key, request_id)
            if item is not None:
                item.users.add(request_id)
                item.used_at = self._step
                if item.opening.done():
                    self._grids[key[0]] = item.opening.result().grid
                    return self._check_grid(request_id, feature)
        except Exception as error:  # vLLM would end with any that this raised
            if item is None or item.tokens is None:
                self._items.pop(key, None)  # the next request tries again
            self._fail(request_id, key[0], error)
        self._first_waiting = self._first_waiting or request_id
        return False

    def _start(self, key: tuple[str, int], request_id: str) -> Item | None:
        """Starts to open tokens. None if others hold too much, unless the request is the first to wait."""
        uuid, num_tokens = key
        if not _UUID.fullmatch(uuid):
            raise Unavailable("invalid_uuid", "not the uuid of an image of vision-sidecar")
        num_bytes = num_tokens * self._width * self._dtype.itemsize
        held = sum(item.num_bytes for item in self._items.values() if item.users)
        if held + num_bytes > self._source.max_bytes and self._first_waiting not in ("", request_id):
            return None
        item = Item(self._threads.submit(self._open, uuid, num_tokens), num_bytes)
        self._items[key] = item
        return item

    def _open(self, uuid: str, num_tokens: int) -> Tokens:
        """Runs in a thread. Raises `Unavailable` and `OSError`."""
        file = self._source.open(uuid, 8 + _MAX_HEADER_BYTES + num_tokens * self._width * 4)
        try:
            tokens = Tokens.read(file)
            if tokens.shape != (num_tokens, self._width):
                here = num_tokens, self._width
                raise Unavailable("misfit", f"its tokens are {tokens.shape}, not {here} as here")
        except BaseException:
            os.close(file)
            raise
        return tokens

    def _fail(self, request_id: str, uuid: str, error: Exception) -> None:
        if request_id in self._failed:
            return
        self._failed.add(request_id)
        self._stats.count(error.reason if isinstance(error, Unavailable) else "other")
        logger.error("request %s fails: tokens of image %s: %r", request_id, ascii(uuid[:80]), error)

    def take_unavailable_requests(self) -> set[str]:
        """The requests that vLLM is to fail."""
        return set(self._failed)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Called at every end of a request."""
        self._failed.discard(request.request_id)
        self._ends.pop(request.request_id, None)
        for index, feature in enumerate(request.mm_features):
            key = feature.identifier, request.get_num_encoder_embeds(index)
            self._drop_user(key, request.request_id)
        return False, None

    def _drop_user(self, key: tuple[str, int], request_id: str) -> None:
        if key in self._items:
            self._items[key].users.discard(request_id)

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the workers can load the tokens."""
        return any(uuid == identifier and item.tokens for (uuid, _), item in self._items.items())

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Has the workers load the tokens in this step."""
        feature = request.mm_features[index]
        item = self._items.get((feature.identifier, request.get_num_encoder_embeds(index)))
        if item is not None and item.tokens is not None and not _brings_its_data(feature):
            path = f"/proc/{os.getpid()}/fd/{item.tokens.file}"
            self._loads.tokens[feature.identifier] = path, item.tokens
            self._stats.count("loads")
            self._stats.count("bytes", item.tokens.num_bytes)

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        """What the workers load in this step. Closes files that no request and no worker needs any more."""
        loads, self._loads = self._loads, Loads()
        if self._first_waiting and not scheduler_output.total_num_scheduled_tokens:
            time.sleep(_PAUSE_S)
        self._first_waiting = ""
        self._step += 1
        self._close(self._step - self._open_steps)
        while len(self._grids) > _MAX_GRIDS:
            del self._grids[next(iter(self._grids))]
        return loads

    def _close(self, before_step: int) -> None:
        """Closes the files without a user since that step."""
        for key, item in list(self._items.items()):
            if item.opening.done() and not item.users and item.used_at < before_step:
                del self._items[key]
                if item.tokens is not None:
                    os.close(item.tokens.file)

    def shutdown(self) -> None:
        """Ends the threads and closes all files."""
        self._threads.shutdown(cancel_futures=True)
        if self.role is ECConnectorRole.SCHEDULER:
            for item in self._items.values():
                item.users.clear()
            self._close(self._step + 1)

    # A worker's side

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Loads the tokens of this step. On CUDA the copies run while the host goes on."""
        loads = self._get_connector_metadata()
        assert isinstance(loads, Loads)
        for uuid, (path, tokens) in loads.tokens.items():
            if uuid not in encoder_cache:
                encoder_cache[uuid] = self._load(path, tokens).to(self._dtype)

    def _load(self, path: str, tokens: Tokens) -> torch.Tensor:
        """The tokens [num_tokens, width] on the worker's device. Raises `OSError` if the file has changed."""
        result = torch.empty(tokens.shape, dtype=tokens.dtype, device=self._device)
        parts = result.view(torch.uint8).view(-1).split(_PART_BYTES)
        offsets = range(tokens.offset, tokens.offset + tokens.num_bytes, _PART_BYTES)
        with open(path, "rb", buffering=0) as file:
            if self._device.type == "cuda":
                self._read_staged(file.fileno(), list(zip(offsets, parts, strict=True)))
            else:
                list(self._threads.map(_read, [file.fileno()] * len(parts), offsets, parts))
        return result

    def _read_staged(self, file: int, parts: list[tuple[int, torch.Tensor]]) -> None:
        """Reads through pinned memory, several parts at the same time."""
        while len(self._buffers) < min(len(parts), _NUM_THREADS):
            buffer = torch.empty(_PART_BYTES, dtype=torch.uint8, pin_memory=True)
            self._buffers.append((buffer, torch.cuda.Event()))
        while parts:
            some, parts = parts[: len(self._buffers)], parts[len(self._buffers) :]
            reads = []
            for (buffer, copied), (offset, part) in zip(self._buffers, some, strict=False):
                copied.synchronize()
                reads.append(self._threads.submit(_read, file, offset, buffer[: len(part)]))
            for read, (buffer, copied), (_, part) in zip(reads, self._buffers, some, strict=False):
                read.result()
                part.copy_(buffer[: len(part)], non_blocking=True)
                copied.record()

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
    def build_prom_metrics(cls, *arguments: Any) -> PromMetrics:
        """Registers the counters."""
        return PromMetrics(*arguments)


def register() -> None:
    """Makes the connector known by its name alone. vLLM calls this if this file was installed with pip."""
    ECConnectorFactory.register_connector("VisionSidecarConnector", __name__, "VisionSidecarConnector")


def _brings_its_data(feature: Any) -> bool:
    """Whether the request itself holds the picture, video or sound, or its tokens."""
    items = {name: item for name, item in (feature.data or {}).items() if item.data is not None}
    return bool(items.keys() - {"image_grid_thw"})


def _end(feature: Any) -> int:
    """Where the image ends in the prompt."""
    return int(feature.mm_position.offset + feature.mm_position.length)


def _read(file: int, offset: int, target: torch.Tensor) -> None:
    """Fills a tensor of bytes on the host."""
    left = target.numpy().data
    while len(left):
        num_bytes = os.preadv(file, [left], offset)
        if not num_bytes:
            raise OSError("the file of tokens has become shorter")
        offset, left = offset + num_bytes, left[num_bytes:]

"""vLLM's connector without vLLM: stand-ins for the modules that it imports, and for requests in vLLM."""

from __future__ import annotations

import enum
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.project import ROOT

WIDTH = 12
NUM_TOKENS = 6
GRID = torch.tensor([1, 4, 6])
UUID = "vs1-" + "0123456789abcdef" * 4


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class Base:
    """As `ECConnectorBase`: what the connector uses of it."""

    def __init__(self, vllm_config: Any, role: Role) -> None:
        self.role = role
        self.is_consumer = vllm_config.ec_transfer_config.ec_role != "ec_producer"
        self.is_producer = vllm_config.ec_transfer_config.ec_role != "ec_consumer"
        self._metadata: Any = None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def _get_connector_metadata(self) -> Any:
        return self._metadata


class Metadata:
    """As `ECConnectorMetadata`."""


class Factory:
    """As `ECConnectorFactory`."""

    registered: dict[str, tuple[str, str]] = {}  # noqa: RUF012

    @classmethod
    def register_connector(cls, name: str, module: str, class_name: str) -> None:
        cls.registered[name] = (module, class_name)


@dataclass
class Stats:
    """As `ECConnectorStats`."""

    data: dict[str, Any] = field(default_factory=dict)


class PromMetrics:
    """As `ECConnectorPromMetrics`, with the class of its counters."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, values: Any) -> None:
        self._counter_cls = metric_types


def _modules(version: str) -> dict[str, ModuleType]:
    base = "vllm.distributed.ec_transfer.ec_connector"
    members: dict[str, dict[str, object]] = {
        "vllm": {"__version__": version},
        "vllm.distributed": {},
        "vllm.distributed.ec_transfer": {},
        base: {},
        f"{base}.base": {"ECConnectorBase": Base, "ECConnectorMetadata": Metadata, "ECConnectorRole": Role},
        f"{base}.factory": {"ECConnectorFactory": Factory},
        f"{base}.metrics": {"ECConnectorPromMetrics": PromMetrics, "ECConnectorStats": Stats},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {
            "current_platform": SimpleNamespace(device_type="cuda" if torch.cuda.is_available() else "cpu")
        },
    }
    found = {}
    for name, content in members.items():
        found[name] = ModuleType(name)
        vars(found[name]).update(content)
    return found


@contextmanager
def connector_module(version: str = "0.32.0") -> Iterator[Any]:
    """The connector's module, as that version of vLLM would load it."""
    stand_ins = _modules(version)
    sys.modules.update(stand_ins)
    name = "vision_sidecar_connector"
    try:
        spec = importlib.util.spec_from_file_location(name, ROOT / f"deploy/vllm/{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # as dataclasses look it up
        spec.loader.exec_module(module)
        yield module
    finally:
        for each in (name, *stand_ins):
            sys.modules.pop(each, None)


def vllm_config(role: str = "ec_consumer", dtype: torch.dtype = torch.float32, **extra: object) -> Any:
    """vLLM's configuration: a model whose tokens have three levels of four columns."""
    vision = SimpleNamespace(out_hidden_size=4, deepstack_visual_indexes=[1, 2])
    return SimpleNamespace(
        ec_transfer_config=SimpleNamespace(ec_role=role, ec_connector_extra_config=extra),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(vision_config=vision), dtype=dtype),
    )


@dataclass
class Value:
    """A member of a feature's data."""

    data: torch.Tensor | None


@dataclass
class Feature:
    """An image of a request: its tokens are at some offset in the prompt."""

    identifier: str
    num_tokens: int
    offset: int = 0
    data: dict[str, Any] | None = field(default_factory=lambda: {"image_grid_thw": Value(GRID)})

    @property
    def mm_position(self) -> Any:
        return SimpleNamespace(offset=self.offset, length=self.num_tokens)


@dataclass
class Chat:
    """A request in vLLM's scheduler."""

    request_id: str
    mm_features: list[Feature]

    def get_num_encoder_embeds(self, index: int) -> int:
        return self.mm_features[index].num_tokens


class Scheduler:
    """vLLM's scheduler, as the connector sees it."""

    def __init__(self, module: Any, **extra: Any) -> None:
        self.connector = module.VisionSidecarConnector(vllm_config(**extra), Role.SCHEDULER)
        self._ready: set[str] = set()  # ids of the requests that the last step scheduled

    def step(self, *chats: Chat, num_computed: int = 0) -> Any:
        """One step, which schedules what is ready. Returns what the workers load."""
        self._ready.clear()
        for chat in chats:
            if self.connector.ensure_cache_available(chat, num_computed):
                self._ready.add(chat.request_id)
                for index, feature in enumerate(chat.mm_features):
                    is_computed = feature.offset + feature.num_tokens <= num_computed
                    if not is_computed and self.connector.has_cache_item(feature.identifier):
                        self.connector.update_state_after_alloc(chat, index)
        return self.connector.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=0))

    def until(self, *chats: Chat) -> Any:
        """Steps until each chat is ready or fails. Returns what the workers load in the last step."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            loads = self.step(*chats)
            failed = self.connector.take_unavailable_requests()
            if {chat.request_id for chat in chats} <= self._ready | failed:
                return loads
        raise AssertionError("the chats wait for ever")

    def failure(self, chat: Chat) -> str:
        """The reason why the chat fails, as the metrics name it. It ends."""
        self.until(chat)
        assert self.connector.take_unavailable_requests() == {chat.request_id}
        self.connector.request_finished(chat)
        assert self.connector.take_unavailable_requests() == set()
        [(reason, number)] = self.connector.get_ec_connector_stats().data.items()
        assert number == 1
        return str(reason)

    def idle(self, num_steps: int = 10) -> None:
        for _ in range(num_steps):
            self.step()


def open_tokens() -> int:
    """How many files of tokens this process has open."""
    names = []
    for file in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{file}"))
        except FileNotFoundError:
            continue  # it was the folder itself
    return sum("safetensors" in name or "memfd:vision-sidecar" in name for name in names)


def load(module: Any, loads: Any, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """What a worker loads."""
    worker = module.VisionSidecarConnector(vllm_config(dtype=dtype, dir="/"), Role.WORKER)
    worker.bind_connector_metadata(loads)
    cache: dict[str, torch.Tensor] = {}
    worker.start_load_caches(cache)
    worker.shutdown()
    return {uuid: tokens.cpu() for uuid, tokens in cache.items()}


def store(folder: Path, uuid: str = UUID, num_tokens: int = NUM_TOKENS, width: int = WIDTH) -> torch.Tensor:
    """Puts tokens into the store, as vision-sidecar does."""
    tokens = torch.randn(num_tokens, width)
    save_file({"tokens": tokens}, folder / f"{uuid}.safetensors", {"grid_thw": "[1,4,6]"})
    return tokens


def chat(uuid: str = UUID, num_tokens: int = NUM_TOKENS, name: str = "a", **more: Any) -> Chat:
    return Chat(name, [Feature(uuid, num_tokens, **more)])

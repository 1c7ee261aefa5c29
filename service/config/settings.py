"""Every setting of the server: its meaning, default and limits, and which values contradict each other.

Knows nothing of where the values come from or how they are used. A value that follows from the checkpoint is
not a setting.
"""

from __future__ import annotations

import os
import re
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, NoReturn, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator
from pydantic_core import PydanticCustomError

from service.config.setting_types import Hosts, Keys, NamedFile, Networks, Origins, Url, read_keys, split_list

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
Dtype = Literal["auto", "float32", "float16", "bfloat16"]
AttnBackend = Literal["auto", "FLASH_ATTN", "FLASH_ATTN_4", "TORCH_SDPA"]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

# Also in `models` and `service.images`. Those take long to import, and a bad flag must be reported at once.
DEFAULT_BUDGET_STEPS = 8
MAX_PIXELS_SUPPORTED = 178_956_970

Counts = Annotated[tuple[Count, ...], BeforeValidator(split_list)]  # comma-separated

# A hub id is a name, or an owner and a name. Any other `model` is a path.
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def _available_cores() -> int:
    """Cores that this process may use. In a container they can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Settings whose values are never shown.
SECRETS = frozenset({"api_keys"})
# Settings that restrict access. An empty value is an error, because it would open the server to all.
NEVER_EMPTY = frozenset({"api_keys", "api_keys_file"})
# Settings that have no effect without another one.
_NEEDED = {
    **dict.fromkeys(("handoff_bytes", "handoff_lease_s"), "handoff_dir"),
    **dict.fromkeys(("llm_api_key_file", "llm_timeout_s"), "llm_url"),
}


class Settings(BaseModel):
    """The configuration of one server. Immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address to listen on; 0.0.0.0 is every IPv4 address, :: every IPv4 and IPv6 address",
    )
    port: int = Field(8080, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    api_keys: Keys = Field(
        (),
        description="API keys, comma-separated; a client sends one as `Authorization: Bearer KEY`; other "
        "users of this machine can see a flag, but not a variable or a file [no key is needed]",
    )
    api_keys_file: NamedFile | None = Field(
        None,
        description="file with more API keys, one on each line; blank lines and lines that begin with # are "
        "ignored",
    )
    page: bool = Field(True, description="serve a page at / to try the service in a browser")
    cors_allow_origins: Origins = Field(
        (),
        description="origins of web pages that may call the server from a browser, such as "
        "https://example.org, comma-separated; * means all [none]",
    )
    log_level: LogLevel = Field("info", description="least severe level that is logged")
    log_format: LogFormat = Field(
        "text", description="format of the log: text, or one JSON object on each line"
    )

    model: str = Field(
        "demo",
        min_length=1,
        description="hub id or local folder; demo is a small model with random weights",
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="name of the model in responses [the hub id or the folder's name]"
    )
    revision: str | None = Field(
        None, min_length=1, description="branch, tag or commit of a hub model [its main branch]"
    )
    dtype: Dtype = Field("auto", description="data type in which the encoder computes")
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$", description="auto, cpu, cuda or cuda:N"
    )
    data_parallel_size: Count = Field(
        1,
        description="number of encoder replicas, each on its own GPU, or all on the CPU",
    )
    mm_encoder_attn_backend: AttnBackend = Field("auto", description="attention implementation")
    cudagraph_mm_encoder: bool | None = Field(
        None, description="capture CUDA graphs of the encoder at start and replay them [true with a GPU]"
    )
    encoder_cudagraph_token_budgets: Counts = Field(
        (),
        description="token budgets: sizes of the CUDA graphs in image tokens, comma-separated [inferred from "
        "the pixel limits]",
    )
    encoder_cudagraph_budget_steps: Count = Field(
        DEFAULT_BUDGET_STEPS,
        description="number of inferred token budgets from one size to twice that size; 1: powers of two "
        "times the smallest image",
    )
    encoder_cudagraph_max_images_per_batch: int = Field(
        0, ge=0, description="most images in one graph replay; 0: inferred from the token budgets"
    )
    min_pixels: Count | None = Field(
        None, description="smaller images are enlarged to about this many pixels [the checkpoint's]"
    )
    max_pixels: Count | None = Field(
        None, description="larger images are reduced to about this many pixels [the checkpoint's]"
    )

    max_batch_tokens: Count = Field(
        16384, description="most image tokens in one batch; a larger image gets its own batch"
    )
    max_wait_ms: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="longest time in milliseconds that an idle device waits for more images",
    )
    max_queue_tokens: Count = Field(
        131072, description="most waiting image tokens for each device; further requests are refused"
    )
    max_inflight_bytes: Count = Field(
        2**29,
        description="most bytes of request bodies and fetched images in memory; further requests are refused",
    )
    max_body_bytes: Count = Field(64 * 2**20, description="largest request body in bytes")
    max_image_bytes: Count = Field(20 * 2**20, description="largest encoded image in bytes")
    max_image_pixels: Count = Field(
        2**26, le=MAX_PIXELS_SUPPORTED, description="largest image in pixels, before it is resized"
    )
    max_images_per_request: Count = Field(32, description="most images in one request")
    max_request_tokens: Count = Field(65536, description="most image tokens in one request")
    body_timeout_s: Seconds = Field(30.0, description="longest time in seconds for a request body to arrive")
    request_timeout_s: Seconds = Field(
        30.0, description="longest time in seconds from the headers of a request to its response"
    )
    device_timeout_s: Seconds = Field(
        60.0,
        description="a device that has work but finishes none for this many seconds has failed; so has an "
        "API server process that does not respond",
    )
    decode_threads: Count = Field(
        default_factory=_available_cores,
        description="threads that decode and resize images, in all processes together [number of cores]",
    )
    api_server_count: int = Field(
        0,
        ge=0,
        le=64,
        description="processes that serve HTTP and decode images; each device has its own process besides; "
        "1: a single process for everything, unless there are several GPUs; 0: up to 4 for each GPU, with at "
        "least 4 cores for each process, and 1 on a CPU",
    )
    handoff_dir: NamedFile | None = Field(
        None,
        description="folder on a tmpfs, only for this server, in which tokens are kept for an LLM server "
        "(format=handoff) [none: nothing is kept]",
    )
    handoff_bytes: Count = Field(8 * 2**30, description="most bytes of tokens in handoff_dir")
    handoff_lease_s: Seconds = Field(
        120.0,
        description="time in seconds for which tokens in handoff_dir are kept after they were asked for",
    )
    cache_bytes: int = Field(
        256 * 2**20,
        ge=0,
        description="most bytes of pooled vectors that each API server keeps, so that an image that was seen "
        "before is not encoded again; 0: none",
    )
    llm_url: Url | None = Field(
        None,
        description="URL of an LLM server, such as http://localhost:8000, for chats that come here [none]",
    )
    llm_api_key_file: NamedFile | None = Field(
        None, description="file with the LLM server's API key, which takes the place of the client's"
    )
    llm_timeout_s: Seconds = Field(600.0, description="longest silence of the LLM server in seconds")
    allowed_media_domains: Hosts = Field(
        (), description="exact hosts that image URLs may name, comma-separated [no URL is fetched]"
    )
    allowed_media_networks: Networks = Field(
        (),
        description="networks such as 10.1.0.0/16 in which the hosts of image URLs may be, comma-separated "
        "[public addresses only]",
    )
    media_timeout_s: Seconds = Field(
        5.0, description="longest time in seconds to fetch the image URLs of a request"
    )
    shutdown_delay_s: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="time in seconds at shutdown in which requests are still accepted, but /readyz is 503",
    )
    shutdown_grace_s: Seconds = Field(
        35.0, description="longest time in seconds that accepted requests may take to finish at shutdown"
    )

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if self.max_image_bytes > self.max_body_bytes:
            _contradiction("max_image_bytes", self.max_image_bytes, "max_body_bytes", self.max_body_bytes)
        if self.max_body_bytes > self.max_inflight_bytes:
            _contradiction(
                "max_body_bytes", self.max_body_bytes, "max_inflight_bytes", self.max_inflight_bytes
            )
        if self.max_wait_ms >= self.request_timeout_s * 1e3:
            _refuse(
                f"--max-wait-ms {self.max_wait_ms:g} leaves no time within --request-timeout-s "
                f"{self.request_timeout_s:g}"
            )
        if self.request_timeout_s > self.shutdown_grace_s:
            _contradiction(
                "request_timeout_s", self.request_timeout_s, "shutdown_grace_s", self.shutdown_grace_s
            )
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            _contradiction("min_pixels", self.min_pixels, "max_pixels", self.max_pixels)
        if self.revision is not None and not self.is_hub_id:
            _refuse(f"--revision {self.revision} needs a hub id as --model, not {self.model}")
        if self.data_parallel_size > 1 and ":" in self.device:
            _refuse(
                f"--data-parallel-size {self.data_parallel_size} uses several GPUs, "
                f"but --device {self.device} names a single one"
            )
        for name, needed in _NEEDED.items():
            if name in self.model_fields_set and getattr(self, needed) is None:
                _refuse(f"{flag_of(name)} has no effect without {flag_of(needed)}")
        if self.llm_url is not None and self.handoff_dir is None:
            _refuse("--llm-url needs --handoff-dir, where the LLM server finds the tokens")
        if self.allowed_media_networks and not self.allowed_media_domains:
            _refuse("--allowed-media-networks has no effect without --allowed-media-domains")
        self._refuse_contradictions_about_graphs()
        self.accepted_keys, self.llm_api_key  # noqa: B018 - an unreadable file must stop the start
        return self

    def _refuse_contradictions_about_graphs(self) -> None:
        asking = self.asks_for_graphs
        if asking and self.cudagraph_mm_encoder is False:
            _refuse(f"{asking} needs CUDA graphs, which --cudagraph-mm-encoder false turns off")
        if asking and self.device == "cpu":
            _refuse(f"{asking} needs CUDA graphs, which --device cpu does not have")
        if asking and self.mm_encoder_attn_backend == "TORCH_SDPA":
            _refuse(
                f"{asking} needs CUDA graphs, which --mm-encoder-attn-backend TORCH_SDPA does not support"
            )
        budgets, max_images = (
            self.encoder_cudagraph_token_budgets,
            self.encoder_cudagraph_max_images_per_batch,
        )
        if budgets and "encoder_cudagraph_budget_steps" in self.model_fields_set:
            _refuse(
                "--encoder-cudagraph-budget-steps is for inferred budgets, "
                "but --encoder-cudagraph-token-budgets lists them"
            )
        if budgets and max_images > min(budgets):
            _refuse(
                f"--encoder-cudagraph-max-images-per-batch {max_images} is larger than {min(budgets)}, "
                "the smallest of --encoder-cudagraph-token-budgets"
            )

    @cached_property
    def asks_for_graphs(self) -> str | None:
        """The first given flag that has an effect only with CUDA graphs, or None."""
        asking = {
            "cudagraph_mm_encoder": self.cudagraph_mm_encoder,
            "encoder_cudagraph_token_budgets": self.encoder_cudagraph_token_budgets,
            "encoder_cudagraph_budget_steps": "encoder_cudagraph_budget_steps" in self.model_fields_set,
            "encoder_cudagraph_max_images_per_batch": self.encoder_cudagraph_max_images_per_batch,
        }
        return next((flag_of(name) for name, given in asking.items() if given), None)

    @cached_property
    def accepted_keys(self) -> tuple[SecretStr, ...]:
        """All keys that a client may send. If there are none, no key is needed."""
        return self.api_keys + _keys_of("api_keys_file", self.api_keys_file)

    @cached_property
    def llm_api_key(self) -> SecretStr | None:
        """The key that is sent to the LLM server."""
        keys = _keys_of("llm_api_key_file", self.llm_api_key_file)
        if len(keys) > 1:
            _refuse(f"--llm-api-key-file: {self.llm_api_key_file} has more than one key")
        return keys[0] if keys else None

    @property
    def is_demo(self) -> bool:
        """Whether the model is the built-in one with random weights."""
        return self.model == "demo"

    @cached_property
    def is_hub_id(self) -> bool:
        """Whether `model` is the id of a hub repository, and not the demo, a folder or a path."""
        return (
            not self.is_demo and _HUB_ID.fullmatch(self.model) is not None and not Path(self.model).is_dir()
        )

    @cached_property
    def served_name(self) -> str:
        """The model's name in responses: `served_model_name`, else the hub id or the name of the folder."""
        if self.served_model_name is not None:
            return self.served_model_name
        if self.is_hub_id:
            return self.model
        return Path(self.model).absolute().name or "model"


def _keys_of(name: str, file: Path | None) -> tuple[SecretStr, ...]:
    """The keys in a file, which the setting `name` gives. None if there is no file."""
    try:
        return () if file is None else read_keys(file)
    except ValueError as error:
        _refuse(f"{flag_of(name)}: {error}")


def _contradiction(small: str, small_value: float, large: str, large_value: float) -> NoReturn:
    _refuse(f"{flag_of(small)} {small_value} is larger than {flag_of(large)} {large_value}")


def _refuse(message: str) -> NoReturn:
    raise PydanticCustomError("contradiction", "{message}", {"message": message})


def flag_of(name: str) -> str:
    """`--max-pixels` for `max_pixels`."""
    return "--" + name.replace("_", "-")

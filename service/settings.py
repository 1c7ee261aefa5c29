"""Every knob of the server: its meaning, its default, its limits; read from flags and environment variables.

Knows nothing of what the values are used for. What follows from the checkpoint is no setting.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, NoReturn, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from service.images import MAX_PIXELS_SUPPORTED

ENV_PREFIX = "VISION_SIDECAR_"

LogLevel = Literal["debug", "info", "warning", "error"]
Dtype = Literal["auto", "float32", "float16", "bfloat16"]
AttnBackend = Literal["auto", "FLASH_ATTN", "TORCH_SDPA"]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

# A hub id is a name, or an owner and a name. All else that `model` may hold is a path.
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

# Kubernetes gives every pod these variables for a Service called vision-sidecar. They are not ours.
_SERVICE_LINK = re.compile(
    ENV_PREFIX
    + r"(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_.*)?|PORT=(tcp|udp|sctp)://.*)(=.*)?",
    re.DOTALL,
)


class SettingsError(Exception):
    """A flag or variable that cannot be used. The message is one line for the operator."""


def _available_cores() -> int:
    """Cores that this process may run on, which in a container can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Settings(BaseModel):
    """The configuration of one server, immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    log_level: LogLevel = Field("info", description="least severe level that is logged")

    model: str = Field(
        "demo",
        min_length=1,
        description="hub id or local folder; demo is a small encoder with random weights",
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="name of the model in answers [the hub id or the folder's name]"
    )
    revision: str | None = Field(
        None, min_length=1, description="branch, tag or commit of a model from the hub [its main branch]"
    )
    dtype: Dtype = Field("auto", description="type that the encoder computes in")
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$", description="auto, cpu, cuda or cuda:N"
    )
    mm_encoder_attn_backend: AttnBackend = Field("auto", description="implementation of attention")
    min_pixels: Count | None = Field(
        None, description="smaller images are enlarged to about this many pixels [the checkpoint's]"
    )
    max_pixels: Count | None = Field(
        None, description="larger images are reduced to about this many pixels [the checkpoint's]"
    )

    max_body_bytes: Count = Field(64 * 2**20, description="largest request body in bytes")
    max_image_bytes: Count = Field(20 * 2**20, description="largest encoded image in bytes")
    max_image_pixels: Count = Field(
        2**26, le=MAX_PIXELS_SUPPORTED, description="largest image in pixels before it is resized"
    )
    max_images_per_request: Count = Field(32, description="most images in one request")
    max_request_tokens: Count = Field(65536, description="most image tokens in one request")
    body_timeout_s: Seconds = Field(30.0, description="longest time in seconds for a request body to arrive")
    decode_threads: Count = Field(
        default_factory=_available_cores, description="threads that decode and resize images [cores]"
    )
    shutdown_grace_s: Seconds = Field(
        35.0, description="longest time in seconds that admitted requests may take to finish at shutdown"
    )

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if self.max_image_bytes > self.max_body_bytes:
            _contradiction("max_image_bytes", self.max_image_bytes, "max_body_bytes", self.max_body_bytes)
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            _contradiction("min_pixels", self.min_pixels, "max_pixels", self.max_pixels)
        if self.revision is not None and not self.is_hub_id:
            raise PydanticCustomError(
                "contradiction",
                "{message}",
                {"message": f"--revision {self.revision} needs a hub id as --model, not {self.model}"},
            )
        return self

    @cached_property
    def is_hub_id(self) -> bool:
        """Whether `model` names a repository on the hub: not the demo, not a folder, not a path."""
        return (
            self.model != "demo"
            and _HUB_ID.fullmatch(self.model) is not None
            and not Path(self.model).is_dir()
        )

    @cached_property
    def served_name(self) -> str:
        """The model's name in answers: `served_model_name`, else the hub id or the folder's name; no path."""
        if self.served_model_name is not None:
            return self.served_model_name
        if self.is_hub_id:
            return self.model
        return Path(self.model).absolute().name or "model"


def _contradiction(small: str, small_value: int, large: str, large_value: int) -> NoReturn:
    message = f"{_flag(small)} {small_value} is larger than {_flag(large)} {large_value}"
    raise PydanticCustomError("contradiction", "{message}", {"message": message})


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one flag for each setting. Only flags that were given reach the namespace, as unparsed strings."""
    for name, field in Settings.model_fields.items():
        choices = [value for value in get_args(field.annotation) if isinstance(value, str)]
        metavar = "{" + ",".join(choices) + "}" if choices else name.rsplit("_", 1)[-1].upper()
        # Where the default is found at start, the description says so.
        default = "" if field.default_factory or field.default is None else f" [{field.default}]"
        text = f"{field.description}{default} ({_variable(name)})".replace("%", "%%")
        parser.add_argument(_flag(name), dest=name, default=argparse.SUPPRESS, metavar=metavar, help=text)
        if "_" in name:
            parser.add_argument(
                f"--{name}", dest=name, default=argparse.SUPPRESS, metavar=metavar, help=argparse.SUPPRESS
            )


def parse_settings(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Settings from flags (what follows `serve`) and environment variables; flags win.

    A variable that is empty counts as not set. Raises `SettingsError`; `--help` prints and exits.
    """
    parser = _Parser(
        prog="vision-sidecar serve",
        description="Serve image embeddings over HTTP. The environment variable after a flag sets it too.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        given = unknown[0].split("=", 1)[0]
        raise SettingsError(
            f"unknown argument {given}{_suggestion(given, map(_flag, Settings.model_fields))}"
        )
    flags: dict[str, str] = vars(namespace)
    variables = _read_environ(environ)
    try:
        return Settings.model_validate(variables | flags)
    except ValidationError as error:
        raise SettingsError(_describe(error, flags)) from None


def _read_environ(environ: Mapping[str, str]) -> dict[str, str]:
    names = {_variable(name): name for name in Settings.model_fields}
    values: dict[str, str] = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or _SERVICE_LINK.fullmatch(f"{variable}={value}"):
            continue
        if variable not in names:
            raise SettingsError(f"unknown environment variable {variable}{_suggestion(variable, names)}")
        if value:
            values[names[variable]] = value
    return values


def _suggestion(given: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(given, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _describe(error: ValidationError, flags: Mapping[str, str]) -> str:
    """The first problem, as one line that names the flag or variable, the value and what is allowed."""
    problem = error.errors(include_url=False)[0]
    if not problem["loc"]:
        return problem["msg"]
    name = str(problem["loc"][0])
    source = _flag(name) if name in flags else _variable(name)
    return f"{source}: {problem['input']!r} is not allowed; {problem['msg'][0].lower()}{problem['msg'][1:]}"

"""Reads, checks and resolves the options of a request.

- read: `read_query` takes options from a URL; the readers of bodies take them from forms and JSON.
- check: `check_options` refuses options that no further option and no default could make valid.
- resolve: `resolve_options` fills in the defaults and returns `AnswerOptions`.

Knows the table of options and their conflicts; knows nothing of bodies, routes or responses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast, get_args
from urllib.parse import parse_qsl

from service.answers.answer_options import (
    AnswerOptions,
    EmbedFormat,
    EncodingFormat,
    Pooling,
    option_conflict,
)
from service.answers.dtypes import TORCH_DTYPES, DtypeName
from service.errors import BadRequest, printable
from service.intake.accept import negotiate

CHOICES: Mapping[str, tuple[str, ...]] = {
    "pooling": ("mean", "none"),
    "dtype": tuple(TORCH_DTYPES),
    "encoding_format": ("float", "base64"),
    "format": get_args(EmbedFormat),
}
FLAGS: tuple[str, ...] = ("normalize", "deepstack")
OPTION_NAMES: tuple[str, ...] = ("pooling", "normalize", "deepstack", "dtype", "encoding_format", "format")
# Served media type → `format`. `format=vllm` is JSON too, so a request can only ask for it by name.
MEDIA_TYPES: Mapping[str, EmbedFormat] = {
    "application/json": "json",
    "application/x-safetensors": "safetensors",
    "application/x-npy": "npy",
}

# A real query has about 200 characters. Parsing takes up to a microsecond for each.
MAX_QUERY_BYTES = 4096

# Compared in lower case: JavaScript writes `true` into a query, Python `True`.
_BOOLEANS: Mapping[str, bool] = {"true": True, "1": True, "false": False, "0": False}
_MAX_BOOLEAN_CHARS = 6  # one more than any of them has


def read_query(query_string: bytes) -> dict[str, str]:
    """Reads the options in a URL's query: name → value as sent. Values are not checked.

    Raises `BadRequest` (`invalid_option`) for a name that is unknown or repeated: a misspelt option must not
    pass silently.
    """
    if len(query_string) > MAX_QUERY_BYTES:
        raise BadRequest(
            f"the query has more than {MAX_QUERY_BYTES} characters; images belong in the body",
            code="invalid_option",
        )
    options: dict[str, str] = {}
    for name, value in parse_qsl(query_string.decode("latin-1"), keep_blank_values=True):
        if name not in OPTION_NAMES:
            raise BadRequest(
                f"unknown query parameter {_quoted(name)}; the options are {', '.join(OPTION_NAMES)}, "
                "and images belong in the body",
                code="invalid_option",
                param=printable(name),
            )
        if name in options:
            raise BadRequest(f"the query gives {name} twice", code="invalid_option", param=name)
        options[name] = value
    return options


def check_options(sent: Mapping[str, str | bool]) -> None:
    """Refuses values, and conflicts between values, that no further option and no default could make valid.

    Raises `BadRequest` (`invalid_option` or `option_conflict`).
    """
    _refuse_conflicts({**_choices(sent), **_flags(sent)})


def resolve_options(sent: Mapping[str, str | bool], accept: str | None) -> AnswerOptions:
    """Checks the options that a request sent and fills in the defaults. Names must be known already.

    Without `format` in `sent`, the request's `Accept` header `accept` decides the form of the answer. Raises
    `BadRequest` (`invalid_option` or `option_conflict`) and `NotAcceptable` (406).
    """
    chosen, flags = _choices(sent), _flags(sent)
    form = cast(EmbedFormat, chosen["format"]) if "format" in chosen else negotiate(accept, MEDIA_TYPES)
    values = {**_defaults(form, chosen.get("pooling")), **chosen, **flags, "format": form}
    _refuse_conflicts(values)
    return AnswerOptions(
        pooling=cast(Pooling, values["pooling"]),
        normalize=bool(values["normalize"]),
        deepstack=bool(values["deepstack"]),
        dtype=cast(DtypeName | None, values.get("dtype")),
        encoding_format=cast(EncodingFormat | None, values.get("encoding_format")),
        format=form,
    )


def openai_options(sent: Mapping[str, str | bool], accept: str | None) -> AnswerOptions:
    """The options of a request to `/v1/embeddings`: unit vectors in float32. Raises as `resolve_options`."""
    negotiate(accept, {"application/json": "openai"})
    encoding_format = _choices({"encoding_format": "float", **sent})["encoding_format"]
    return AnswerOptions(
        pooling="mean",
        normalize=True,
        deepstack=False,
        dtype="float32",
        encoding_format=cast(EncodingFormat, encoding_format),
        format="openai",
    )


def _defaults(form: EmbedFormat, pooling: str | None) -> dict[str, str | bool]:
    """The defaults for a form of answer. An option that does not apply to it is left out."""
    if form in ("vllm", "handoff"):
        return {"pooling": "none", "normalize": False, "deepstack": True}
    is_pooled = pooling in (None, "mean")
    defaults: dict[str, str | bool] = {
        "pooling": "mean",
        "normalize": is_pooled,
        "deepstack": False,
        "dtype": "float32",
    }
    return defaults | {"encoding_format": "float"} if form == "json" else defaults


def _choices(sent: Mapping[str, str | bool]) -> dict[str, str]:
    return {name: _choice(name, sent[name]) for name in CHOICES if name in sent}


def _flags(sent: Mapping[str, str | bool]) -> dict[str, bool]:
    return {name: _flag(name, sent[name]) for name in FLAGS if name in sent}


def _refuse_conflicts(values: Mapping[str, str | bool]) -> None:
    """Raises `BadRequest` if two of the options conflict. An option that is missing conflicts with none."""
    pooling, dtype, form = values.get("pooling"), values.get("dtype", "float32"), values.get("format")
    if form in ("vllm", "handoff"):
        _refuse_parts_of_tokens(values, form)
    if form == "handoff" and "dtype" in values:
        raise option_conflict("dtype", "format=handoff always has the model's own dtype")
    if "encoding_format" in values and form not in (None, "json"):
        raise option_conflict("encoding_format", "encoding_format is for format=json only")
    if form == "npy" and dtype == "bfloat16":
        raise option_conflict(
            "dtype", "npy has no bfloat16; ask for another dtype, or for format=safetensors"
        )
    if values.get("normalize") and pooling == "none":
        raise option_conflict("normalize", "normalize=true applies to pooling=mean only")
    if values.get("deepstack") and pooling == "mean":
        raise option_conflict(
            "deepstack", "deepstack=true applies to pooling=none only: the mean covers the main columns"
        )
    if values.get("encoding_format") == "float" and dtype != "float32":
        raise option_conflict(
            "dtype",
            f"JSON floats are float32; dtype={dtype} needs encoding_format=base64 or format=safetensors",
        )


def _refuse_parts_of_tokens(values: Mapping[str, str | bool], form: str) -> None:
    """An LLM server needs all tokens with all their columns, as the encoder made them."""
    for name, refused in (("pooling", "mean"), ("normalize", True), ("deepstack", False)):
        if values.get(name) == refused:
            raise option_conflict(name, f"format={form} always has pooling=none and deepstack=true")


def _choice(name: str, value: str | bool) -> str:
    choices = CHOICES[name]
    if not isinstance(value, str) or value not in choices:
        raise _invalid(name, value, " or ".join(choices))
    return value


def _flag(name: str, value: str | bool) -> bool:
    if isinstance(value, bool):
        return value
    text = value[:_MAX_BOOLEAN_CHARS].lower()  # in JSON the value may have megabytes
    if text not in _BOOLEANS:
        raise _invalid(name, value, "true or false")
    return _BOOLEANS[text]


def _invalid(name: str, value: str | bool, allowed: str) -> BadRequest:
    shown = _quoted(value) if isinstance(value, str) else str(value).lower()
    return BadRequest(f"{name} must be {allowed}, not {shown}", code="invalid_option", param=name)


def _quoted(text: str) -> str:
    return f'"{printable(text)}"'

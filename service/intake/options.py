"""What a caller asks of an image's embedding: options checked, defaults filled in, conflicts refused.

Knows the table of options and what they mean to the encoder; nothing of bodies, routes or responses.
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
# Served media type → `format`. A hand-off to an LLM server is asked for by name only.
MEDIA_TYPES: Mapping[str, EmbedFormat] = {
    "application/json": "json",
    "application/x-safetensors": "safetensors",
    "application/x-npy": "npy",
}


# A real query has about 200 characters. Parsing takes up to a microsecond for each.
MAX_QUERY_BYTES = 4096

# In any case: JavaScript writes `true` into a query, Python `True`.
_BOOLEANS: Mapping[str, bool] = {"true": True, "1": True, "false": False, "0": False}


def read_query(query_string: bytes) -> dict[str, str]:
    """Options out of a URL's query, names checked and values not. A typo must not pass silently."""
    options: dict[str, str] = {}
    if len(query_string) > MAX_QUERY_BYTES:
        raise BadRequest(
            f"the query has more than {MAX_QUERY_BYTES} characters; images belong in the body",
            code="invalid_option",
        )
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
    """Refuses values, and conflicts between values, that no further option and no default could mend.

    Raises 400 `invalid_option` and 400 `option_conflict`.
    """
    _refuse_conflicts({**_choices(sent), **_flags(sent)})


def resolve_options(sent: Mapping[str, str | bool], accept: str | None) -> AnswerOptions:
    """Checks what was sent, under names that are known already, and fills in the defaults.

    `accept` is the request's `Accept` header and decides where no `format` was sent. Raises 400
    `invalid_option`, 400 `option_conflict`, and 406.
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
    """What `/v1/embeddings` answers: unit vectors in float32. Raises as `resolve_options` does."""
    negotiate(accept, {"application/json": "openai"})
    encoding_format = _choices({"encoding_format": "float", **sent})["encoding_format"]
    return AnswerOptions("mean", True, False, "float32", cast(EncodingFormat, encoding_format), "openai")


def _defaults(form: EmbedFormat, pooling: str | None) -> dict[str, str | bool]:
    """The options that apply to a form of answer, where nothing else is said."""
    if form == "vllm":
        return {"pooling": "none", "normalize": False, "deepstack": True}
    pooled = pooling in (None, "mean")
    defaults: dict[str, str | bool] = {
        "pooling": "mean",
        "normalize": pooled,
        "deepstack": False,
        "dtype": "float32",
    }
    return defaults | {"encoding_format": "float"} if form == "json" else defaults


def _choices(sent: Mapping[str, str | bool]) -> dict[str, str]:
    return {name: _choice(name, sent[name]) for name in CHOICES if name in sent}


def _flags(sent: Mapping[str, str | bool]) -> dict[str, bool]:
    return {name: _flag(name, sent[name]) for name in FLAGS if name in sent}


def _refuse_conflicts(values: Mapping[str, str | bool]) -> None:
    """Looks at the options that are there; one that is missing conflicts with none."""
    pooling, dtype, form = values.get("pooling"), values.get("dtype", "float32"), values.get("format")
    if form == "vllm":
        _refuse_parts_of_tokens(values)
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


def _refuse_parts_of_tokens(values: Mapping[str, str | bool]) -> None:
    """An LLM server takes all tokens with all their columns, as the encoder made them."""
    for name, refused in (("pooling", "mean"), ("normalize", True), ("deepstack", False)):
        if values.get(name) == refused:
            raise option_conflict(name, "format=vllm is always of pooling=none with deepstack=true")


def _choice(name: str, value: str | bool) -> str:
    choices = CHOICES[name]
    if not isinstance(value, str) or value not in choices:
        raise _invalid(name, value, " or ".join(choices))
    return value


def _flag(name: str, value: str | bool) -> bool:
    if isinstance(value, bool):
        return value
    if value.lower() not in _BOOLEANS:
        raise _invalid(name, value, "true or false")
    return _BOOLEANS[value.lower()]


def _invalid(name: str, value: str | bool, allowed: str) -> BadRequest:
    shown = _quoted(value) if isinstance(value, str) else str(value).lower()
    return BadRequest(f"{name} must be {allowed}, not {shown}", code="invalid_option", param=name)


def _quoted(text: str) -> str:
    return f'"{printable(text)}"'

"""What a caller asks of an image's embedding: options checked, defaults filled in, conflicts refused.

Knows the table of options and what they mean to the encoder; nothing of bodies, routes or responses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast
from urllib.parse import parse_qsl

from models import OutputSpec
from service.dtypes import TORCH_DTYPES, DtypeName
from service.errors import BadRequest, NotAcceptable, printable

Pooling = Literal["mean", "none"]
EncodingFormat = Literal["float", "base64"]

CHOICES: Mapping[str, tuple[str, ...]] = {
    "pooling": ("mean", "none"),
    "dtype": tuple(TORCH_DTYPES),
    "encoding_format": ("float", "base64"),
    "format": ("json",),
}
FLAGS: tuple[str, ...] = ("normalize", "deepstack")
OPTION_NAMES: tuple[str, ...] = ("pooling", "normalize", "deepstack", "dtype", "encoding_format", "format")
MEDIA_TYPES: Mapping[str, str] = {"application/json": "json"}  # served media type → `format`

# JSON of more numbers than this is slower to write and to read than any encoder, and some 50 MB large.
MAX_JSON_FLOATS = 4_194_304

_BOOLEANS: Mapping[str, bool] = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class EmbedOptions:
    """The options of one request, with every default resolved."""

    pooling: Pooling
    normalize: bool
    deepstack: bool
    dtype: DtypeName
    encoding_format: EncodingFormat

    def output_spec(self) -> OutputSpec:
        """The same, in the encoder's terms."""
        return OutputSpec(
            pooled=self.pooling == "mean",
            normalize=self.normalize,
            deepstack=self.deepstack,
            dtype=TORCH_DTYPES[self.dtype],
        )

    def check_size(self, *, num_images: int, num_tokens: int, hidden_size: int, width: int) -> None:
        """Refuses a response of more JSON floats than may be sent, before anything is encoded.

        `num_tokens` is the sum over the images, `width` the columns of a token with its deepstack columns.
        """
        if self.encoding_format != "float":
            return
        rows = num_images if self.pooling == "mean" else num_tokens
        num_floats = rows * (width if self.deepstack else hidden_size)
        if num_floats > MAX_JSON_FLOATS:
            raise BadRequest(
                f"the response would hold {num_floats} JSON floats, and at most {MAX_JSON_FLOATS} are sent; "
                "ask for encoding_format=base64, or send fewer or smaller images",
                code="response_too_large",
                param="encoding_format",
            )


def read_query(query_string: bytes) -> dict[str, str]:
    """Options out of a URL's query, names checked and values not. A typo must not pass silently."""
    options: dict[str, str] = {}
    for name, value in parse_qsl(query_string.decode("latin-1"), keep_blank_values=True):
        if name not in OPTION_NAMES:
            raise BadRequest(
                f"unknown query parameter {_quoted(name)}; the options are {', '.join(OPTION_NAMES)}",
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


def resolve_options(sent: Mapping[str, str | bool], accept: str | None) -> EmbedOptions:
    """Checks what was sent, under names that are known already, and fills in the defaults.

    `accept` is the request's `Accept` header and decides where no `format` was sent. Raises 400
    `invalid_option`, 400 `option_conflict`, and 406.
    """
    chosen, flags = _choices(sent), _flags(sent)
    if "format" not in chosen and negotiate(accept, MEDIA_TYPES) is None:
        raise NotAcceptable(
            f"this route answers {', '.join(MEDIA_TYPES)}; the Accept header allows none of it"
        )
    pooling = cast(Pooling, chosen.get("pooling", "mean"))
    options = EmbedOptions(
        pooling=pooling,
        normalize=flags.get("normalize", pooling == "mean"),
        deepstack=flags.get("deepstack", False),
        dtype=cast(DtypeName, chosen.get("dtype", "float32")),
        encoding_format=cast(EncodingFormat, chosen.get("encoding_format", "float")),
    )
    _refuse_conflicts(vars(options))
    return options


def _choices(sent: Mapping[str, str | bool]) -> dict[str, str]:
    return {name: _choice(name, sent[name]) for name in CHOICES if name in sent}


def _flags(sent: Mapping[str, str | bool]) -> dict[str, bool]:
    return {name: _flag(name, sent[name]) for name in FLAGS if name in sent}


def _refuse_conflicts(values: Mapping[str, str | bool]) -> None:
    """Looks at the options that are there; one that is missing conflicts with none."""
    pooling, dtype = values.get("pooling"), values.get("dtype", "float32")
    if values.get("normalize") and pooling == "none":
        raise _conflict("normalize", "normalize=true applies to pooling=mean only")
    if values.get("deepstack") and pooling == "mean":
        raise _conflict(
            "deepstack", "deepstack=true applies to pooling=none only: the mean covers the main columns"
        )
    if values.get("encoding_format") == "float" and dtype != "float32":
        raise _conflict(
            "dtype", f"JSON floats are float32; ask for dtype={dtype} with encoding_format=base64"
        )


def _conflict(name: str, message: str) -> BadRequest:
    return BadRequest(message, code="option_conflict", param=name)


def _choice(name: str, value: str | bool) -> str:
    choices = CHOICES[name]
    if not isinstance(value, str) or value not in choices:
        raise _invalid(name, value, " or ".join(choices))
    return value


def _flag(name: str, value: str | bool) -> bool:
    if isinstance(value, bool):
        return value
    if value not in _BOOLEANS:
        raise _invalid(name, value, "true or false")
    return _BOOLEANS[value]


def _invalid(name: str, value: str | bool, allowed: str) -> BadRequest:
    shown = _quoted(value) if isinstance(value, str) else str(value).lower()
    return BadRequest(f"{name} must be {allowed}, not {shown}", code="invalid_option", param=name)


def _quoted(text: str) -> str:
    return f'"{printable(text)}"'


def negotiate(accept: str | None, served: Mapping[str, str]) -> str | None:
    """The format that an `Accept` header prefers among `served` (media type → format), or None.

    Without a header, or between equals, the first one served. Source: RFC 9110, section 12.5.1.
    """
    if not accept or accept == "*/*":
        return next(iter(served.values()))
    ranges = _accept_ranges(accept)
    best, best_quality = None, 0.0
    for media_type, name in served.items():
        quality = _quality(media_type, ranges)
        if quality > best_quality:
            best, best_quality = name, quality
    return best


def _accept_ranges(accept: str) -> dict[str, float]:
    """Media range → q-value. A range whose q-value is no number from 0 to 1 is left out."""
    ranges: dict[str, float] = {}
    for part in accept.lower().split(","):
        media_range, *parameters = (piece.strip() for piece in part.split(";"))
        weights = [text[2:].strip() for text in parameters if text.startswith("q=")]
        try:
            quality = float(weights[0]) if weights else 1.0
        except ValueError:
            continue
        if media_range and 0.0 <= quality <= 1.0:
            ranges[media_range] = quality
    return ranges


def _quality(media_type: str, ranges: Mapping[str, float]) -> float:
    """q-value of a media type by the most specific range that matches it."""
    for media_range in (media_type, f"{media_type.partition('/')[0]}/*", "*/*"):
        if media_range in ranges:
            return ranges[media_range]
    return 0.0

"""The shapes of requests and answers: what `/openapi.json` says of them, and the answers that are small.

`/embed` is not built from these: its numbers go from arrays to bytes directly, and a test holds it to them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from service.errors import ErrorCode
from service.options import CHOICES, FLAGS

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"


class Shape(BaseModel):
    """A shape with exactly these members."""

    model_config = ConfigDict(extra="forbid")


class EmbeddingItem(Shape):
    object: Literal["embedding"]
    index: int = Field(description="position of the image in the request")
    embedding: list[float] | list[list[float]] | str = Field(
        description="one vector with `pooling=mean`, a vector for each token with `pooling=none`; "
        "with `encoding_format=base64` the little-endian bytes of the same"
    )
    shape: list[int] | None = Field(
        None, description="with `encoding_format=base64` only: of the array in it"
    )
    num_tokens: int
    grid_thw: tuple[int, int, int] = Field(description="grid in patches, before the spatial merge")
    width: int = Field(description="in pixels, of the image as seen, after its EXIF orientation")
    height: int
    sha256: str = Field(description="of the bytes sent, in hex")


class EmbedUsage(Shape):
    num_images: int
    num_tokens: int


class EmbedResponse(Shape):
    object: Literal["list"]
    model: str
    revision: str | None
    fingerprint: str = Field(description="vectors may be compared where this is the same")
    dtype: Literal["float32", "float16", "bfloat16"]
    data: list[EmbeddingItem]
    usage: EmbedUsage


class ErrorDetail(Shape):
    message: str
    type: str
    param: str | None = Field(description="the culprit, such as `images[3]` or an option")
    code: ErrorCode


class ErrorResponse(Shape):
    error: ErrorDetail


class Status(Shape):
    status: Literal["ok"] = "ok"


class Limits(Shape):
    max_body_bytes: int
    max_image_bytes: int
    max_image_pixels: int
    max_images_per_request: int
    max_request_tokens: int


class CudaGraphs(Shape):
    enabled: bool
    token_budgets: tuple[int, ...] = Field(description="sizes of the captured graphs, in image tokens")
    max_images_per_batch: int = Field(description="most images in one replay; 0 without graphs")


class Preprocessing(Shape):
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Info(Shape):
    model: str
    demo: bool = Field(description="true: random weights, the vectors mean nothing")
    revision: str | None
    fingerprint: str
    dtype: str
    devices: tuple[str, ...] = Field(description="one for each replica, as metrics name them")
    attn_backend: str
    encoder_cudagraph: CudaGraphs
    hidden_size: int = Field(description="numbers of a pooled vector, and main columns of a token")
    width: int = Field(description="columns of a token with its deepstack columns")
    num_deepstack: int = Field(description="deepstack levels, each of `hidden_size` columns")
    limits: Limits
    preprocessing: Preprocessing
    version: str


class ModelCard(Shape):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["vision-sidecar"] = "vision-sidecar"


class ModelList(Shape):
    object: Literal["list"] = "list"
    data: list[ModelCard]


_STATUS_TEXTS = {
    400: "Not an image or a truncated one, malformed JSON or base64, options that cannot apply, "
    "an image URL that is refused or that answered 4xx",
    404: "No such path",
    405: "The path does not take this method",
    406: "The Accept header allows no format that is served",
    408: "The body took too long to arrive",
    413: "Over a limit: bytes, pixels, images or tokens",
    415: "A content type or image format that is not served",
    422: "JSON of the wrong shape",
    431: "The headers are too large",
    500: "The server failed; its log has the request id",
    502: "An image URL could not be fetched: its server failed",
    503: "Not ready, shutting down, or the device failed",
    504: "An image did not arrive from its URL in time",
}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What OpenAPI says of the errors of a route."""
    return {status: {"model": ErrorResponse, "description": _STATUS_TEXTS[status]} for status in statuses}


_OPTION_TEXTS = {
    "pooling": "`mean`: one vector per image, the mean of its tokens; `none`: all tokens",
    "normalize": "divide by the L2 norm; `pooling=mean` only, where it is the default",
    "deepstack": "append the deepstack columns; `pooling=none` only",
    "dtype": "type of the numbers; JSON floats are float32",
    "encoding_format": "`float`, or `base64` of little-endian bytes",
    "format": "form of the answer; without it the `Accept` header decides",
}
_OPTION_DEFAULTS = {
    "pooling": "mean",
    "deepstack": False,
    "dtype": "float32",
    "encoding_format": "float",
    "format": "json",
}


def _option_schema(name: str) -> dict[str, Any]:
    kind: dict[str, Any] = (
        {"type": "boolean"} if name in FLAGS else {"type": "string", "enum": [*CHOICES[name]]}
    )
    default = {"default": _OPTION_DEFAULTS[name]} if name in _OPTION_DEFAULTS else {}
    return {**kind, **default, "description": _OPTION_TEXTS[name]}


def _only(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """An object with that one member."""
    return {
        "type": "object",
        "properties": {name: schema},
        "required": [name],
        "additionalProperties": False,
    }


def _json_body() -> dict[str, Any]:
    item = {
        "oneOf": [
            {"type": "string", "description": "base64, a `data:` URI or a URL"},
            _only("data", {"type": "string", "description": "base64"}),
            _only(
                "url",
                {
                    "type": "string",
                    "description": "a `data:` URI; http and https where the server allows their host",
                },
            ),
        ]
    }
    properties = {
        "images": {"oneOf": [{"type": "array", "items": item, "minItems": 1}, *item["oneOf"]]},
        **{name: _option_schema(name) for name in _OPTION_TEXTS},
    }
    return {
        "schema": {
            "type": "object",
            "properties": properties,
            "required": ["images"],
            "additionalProperties": False,
        },
        "examples": {
            "one image": {"value": {"images": [PIXEL]}},
            "a data: URI": {"value": {"images": {"url": f"data:image/png;base64,{PIXEL}"}}},
            "all tokens": {
                "value": {"images": [{"data": PIXEL}], "pooling": "none", "encoding_format": "base64"}
            },
        },
    }


def _form_body() -> dict[str, Any]:
    images = {"type": "array", "items": {"type": "string", "format": "binary"}}
    properties = {"images": images, **{name: _option_schema(name) for name in _OPTION_TEXTS}}
    return {"schema": {"type": "object", "properties": properties, "required": ["images"]}}


EMBED_OPENAPI: dict[str, Any] = {
    "parameters": [
        {"name": name, "in": "query", "description": text, "schema": _option_schema(name)}
        for name, text in _OPTION_TEXTS.items()
    ],
    "requestBody": {
        "required": True,
        "content": {
            "image/*": {"schema": {"type": "string", "format": "binary"}},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            "multipart/form-data": _form_body(),
            "application/json": _json_body(),
        },
    },
}

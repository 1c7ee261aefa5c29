"""The description of requests, errors and binary answers in `/openapi.json`. Validates nothing."""

from __future__ import annotations

from typing import Any

from service.intake.options import CHOICES, FLAGS, MEDIA_TYPES
from service.routes.schemas import EmbedResponse, ErrorResponse, VllmResponse

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"

STATUS_TEXTS = {
    400: "Not an image, a truncated image, malformed JSON or base64, options that conflict, "
    "an image URL that is refused or was answered with 4xx",
    404: "No such path or model",
    406: "The Accept header allows none of the served formats",
    408: "The body took too long to arrive",
    413: "Over a limit: bytes, pixels, images or tokens",
    415: "A content type or image format that is not served",
    422: "JSON of the wrong shape",
    429: "The server is full: retry after the seconds in `Retry-After`",
    431: "The headers are too large",
    500: "The server failed; its log has the request id",
    502: "The server of an image URL failed, or the LLM server cannot be reached",
    503: "Not ready, shutting down, or the device failed",
    504: "The request took longer than the time limit, an image did not arrive from its URL in time, "
    "or the LLM server sent nothing for too long",
}


_RETRY_AFTER = {"Retry-After": {"description": "in seconds", "schema": {"type": "integer"}}}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The description of a route's errors."""
    return {
        status: {
            "model": ErrorResponse,
            "description": STATUS_TEXTS[status],
            **({"headers": _RETRY_AFTER} if status in (429, 503) else {}),
        }
        for status in statuses
    }


# There is no `default` in the schemas: it depends on the format, and Swagger UI would send it.
_OPTION_TEXTS = {
    "pooling": "`mean`: one vector per image, the mean of its tokens; `none`: all tokens "
    "[`mean`; `none` with `format=vllm`]",
    "normalize": "divide by the L2 norm; `pooling=mean` only [`true` there]",
    "deepstack": "append the deepstack columns; `pooling=none` only [`false`; `true` with `format=vllm`]",
    "dtype": "type of the numbers; JSON floats are float32, npy has no bfloat16 "
    "[`float32`; with `format=vllm` the model's own]",
    "encoding_format": "numbers in JSON: `float`, or `base64` of little-endian bytes; "
    "`format=json` only [`float` there]",
    "format": "format of the answer; without it the `Accept` header decides. `npy` holds the tokens of one "
    "image only; `vllm` is JSON with content parts for a chat request [`json`]",
}


def _option_schema(name: str) -> dict[str, Any]:
    kind: dict[str, Any] = (
        {"type": "boolean"} if name in FLAGS else {"type": "string", "enum": [*CHOICES[name]]}
    )
    return {**kind, "description": _OPTION_TEXTS[name]}


def _json_option_schema(name: str) -> dict[str, Any]:
    """In JSON a boolean may be 1 or 0, and null counts as missing."""
    kind: dict[str, Any] = (
        {"anyOf": [{"type": ["boolean", "null"]}, {"enum": [1, 0]}]}
        if name in FLAGS
        else {"type": ["string", "null"], "enum": [*CHOICES[name], None]}
    )
    return {**kind, "description": _OPTION_TEXTS[name]}


def _only(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with a single member."""
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
                    "description": "a `data:` URI, or an http or https URL if the server allows its host",
                },
            ),
        ]
    }
    properties = {
        "images": {"oneOf": [{"type": "array", "items": item, "minItems": 1}, *item["oneOf"]]},
        **{name: _json_option_schema(name) for name in _OPTION_TEXTS},
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
            "content parts for vLLM": {"value": {"images": [PIXEL], "format": "vllm"}},
        },
    }


def _form_body() -> dict[str, Any]:
    images = {"type": "array", "items": {"type": "string", "format": "binary"}}
    properties = {"images": images, **{name: _option_schema(name) for name in _OPTION_TEXTS}}
    return {"schema": {"type": "object", "properties": properties, "required": ["images"]}}


BINARY = {"schema": {"type": "string", "format": "binary"}}
EMBED_OPENAPI: dict[str, Any] = {
    "parameters": [
        {"name": name, "in": "query", "description": text, "schema": _option_schema(name)}
        for name, text in _OPTION_TEXTS.items()
    ],
    "requestBody": {
        "required": True,
        "content": {
            "image/*": BINARY,
            "application/octet-stream": BINARY,
            "multipart/form-data": _form_body(),
            "application/json": _json_body(),
        },
    },
}

EMBED_ANSWER: dict[str, Any] = {
    "model": EmbedResponse | VllmResponse,
    "description": "JSON: one entry for each image, in order; with `format=vllm` content parts. "
    "safetensors: `embeddings` [images, hidden], or [all tokens, width] with `pooling=none`; `grid_thw` "
    "[images, 3] and `num_tokens` [images], both int64; metadata `model`, `revision`, `fingerprint`, "
    "`pooling`, `deepstack`, `dtype`. npy: the same array as `embeddings`",
    "content": {media_type: BINARY for media_type in MEDIA_TYPES if media_type != "application/json"},
}

_OPENAI_ITEM = {
    "oneOf": [
        {"type": "string", "minLength": 1, "description": "base64, a `data:` URI or a URL"},
        _only("image", {"type": "string", "minLength": 1, "description": "base64, a `data:` URI or a URL"}),
    ]
}
EMBEDDINGS_OPENAPI: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "model": {
                            "type": ["string", "null"],
                            "description": "name of the served model; may be left out",
                        },
                        "input": {
                            "oneOf": [
                                {"type": "array", "items": _OPENAI_ITEM, "minItems": 1},
                                *_OPENAI_ITEM["oneOf"],
                            ],
                            "description": "images; text is refused",
                        },
                        "encoding_format": {
                            "enum": [*CHOICES["encoding_format"], None],
                            "description": "`float`, or `base64` of little-endian float32 [`float`]",
                        },
                        "dimensions": {
                            "type": ["integer", "null"],
                            "description": "only the length of the vectors is accepted: they are not cut",
                        },
                    },
                    "required": ["input"],
                },
                "examples": {
                    "one image": {"value": {"input": PIXEL}},
                    "in base64": {"value": {"input": [{"image": PIXEL}], "encoding_format": "base64"}},
                },
            }
        },
    },
}

"""Reads the body of `POST /v1/embeddings`: `{"model", "input", "encoding_format", "dimensions", …}`.

Knows what OpenAI's clients send; `json_body` knows how an image is written in JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from service.errors import ApiError, BadRequest, InvalidShape, NotFound, image_param, printable
from service.fetching.image_urls import ImageUrl
from service.images.formats import sniff
from service.intake.embed_body import BodyLimits, EmbedBody
from service.intake.json_body import JsonNumber, load_object, read_images, read_item, without_nulls

_IMAGE_HINT = 'send each image of input as {"image": "<base64, data: URI or URL>"}'
_URL = re.compile(r"(?:data|https?):", re.IGNORECASE)


@dataclass(frozen=True)
class ServedModel:
    """The values that the members `model` and `dimensions` of a request may have."""

    name: str
    hidden_size: int  # the length of a vector


def parse_openai_body(chunks: list[bytes], limits: BodyLimits, served: ServedModel) -> EmbedBody:
    """Parses the document and decodes its images. Unknown members are ignored.

    Raises as `load_object` and `read_images` do, and `NotFound` for another model.
    """
    document = load_object(chunks, '{"model": "…", "input": ["<base64>"]}')
    _check_model(document.get("model"), served)
    _check_dimensions(document.get("dimensions"), served)
    images = read_images(_input(document), limits, _image)
    return EmbedBody(images, _options(document.get("encoding_format")))


def _input(document: Mapping[str, object]) -> object:
    """The member `input`. Raises `InvalidShape` if it is missing; null counts as missing."""
    value = document.get("input")
    if value is None and document.get("messages") is not None:
        raise InvalidShape(f"this route takes no chat messages; {_IMAGE_HINT}", param="messages")
    if value is None:
        raise InvalidShape(f"the member input is missing; {_IMAGE_HINT}", param="input")
    return value


def _check_model(model: object, served: ServedModel) -> None:
    """One model is served, so a request need not name it."""
    if model is not None and not isinstance(model, str):
        raise InvalidShape("model must be a string", param="model")
    if model not in (None, served.name):
        raise NotFound(
            f'the model "{printable(model)}" is not served; GET /v1/models lists the model that is',
            code="model_not_found",
            param="model",
        )


def _check_dimensions(dimensions: object, served: ServedModel) -> None:
    if dimensions not in (None, JsonNumber(str(served.hidden_size))):
        raise BadRequest(
            f"dimensions must be {served.hidden_size}, the length of the model's vectors, or be left out",
            code="invalid_option",
            param="dimensions",
        )


def _options(encoding_format: object) -> dict[str, str | bool]:
    if encoding_format is None:
        return {}
    if not isinstance(encoding_format, str):
        raise InvalidShape("encoding_format must be a string", param="encoding_format")
    return {"encoding_format": encoding_format}


def _image(item: object, index: int, max_bytes: int) -> bytes | ImageUrl:
    """The image of one item of `input`. Raises `ApiError`, which names the image by `index`."""
    item = without_nulls(item, ("image", "data", "url"))
    match item:
        case str() if item.strip() and not _URL.match(item.strip()):
            return _image_or_text(item, index, max_bytes)
        case {"image": str(image), **others} if not others:
            return read_item(image, index, max_bytes)
        case JsonNumber() | list() | {"text": _}:
            raise _text_refused(index)
        case {"image_url": _} | {"source": _} | {"content": _}:
            raise InvalidShape(
                f"this has the form of a chat request, which this route does not take; {_IMAGE_HINT}",
                param=image_param(index),
            )
        case Mapping() if "image" in item:
            raise InvalidShape(
                'an item with "image" must be {"image": "<base64, data: URI or URL>"} and hold nothing else',
                param=image_param(index),
            )
    return read_item(item, index, max_bytes)


def _image_or_text(text: str, index: int, max_bytes: int) -> bytes | ImageUrl:
    """Decodes base64. Many words are base64, too, so the bytes must look like a file of a known kind."""
    try:
        image = read_item(text, index, max_bytes)
    except BadRequest as error:
        raise _text_refused(index) if error.status == 400 else error from None
    if isinstance(image, ImageUrl):
        return image
    try:
        sniff(image)
    except ApiError as error:
        if error.code == "invalid_image":
            raise _text_refused(index) from None
    return image


def _text_refused(index: int) -> BadRequest:
    return BadRequest(
        "this is not the base64 of an image, and text is not supported: this server embeds images only; "
        + _IMAGE_HINT,
        code="text_not_supported",
        param=image_param(index),
    )

"""The body of `POST /v1/embeddings`: `{"model", "input", "encoding_format", "dimensions", …}`.

Knows what OpenAI's clients send; what an image looks like inside JSON is `json_body`'s affair.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from service.errors import ApiError, BadRequest, InvalidShape, NotFound, image_param, printable
from service.fetching.image_urls import ImageUrl
from service.images.formats import sniff
from service.intake.embed_body import BodyLimits, EmbedBody
from service.intake.json_body import Number, load_object, read_images, read_item

_URL = re.compile(r"(?:data|https?):", re.IGNORECASE)


@dataclass(frozen=True)
class ServedModel:
    """What a request may say of the model."""

    name: str
    hidden_size: int  # numbers of a vector


def parse_openai_body(chunks: list[bytes], limits: BodyLimits, served: ServedModel) -> EmbedBody:
    """Parses the document and decodes its images. Members that are not known are ignored.

    Raises as `load_object` and `read_images` do, and `NotFound` for another model.
    """
    document = load_object(chunks, '{"model": "…", "input": ["<base64>"]}')
    _check_model(document.get("model"), served)
    _check_dimensions(document.get("dimensions"), served)
    if document.get("input") is None:
        raise InvalidShape("the member input is missing", param="input")
    images = read_images(document["input"], limits, _image)
    return EmbedBody(images, _options(document.get("encoding_format")))


def _check_model(model: object, served: ServedModel) -> None:
    """There is but one, so a request need not name it."""
    if model is not None and not isinstance(model, str):
        raise InvalidShape("model must be a string", param="model")
    if model not in (None, served.name):
        raise NotFound(
            f'there is no model "{printable(model)}" here; GET /v1/models says what is served',
            code="model_not_found",
            param="model",
        )


def _check_dimensions(dimensions: object, served: ServedModel) -> None:
    if dimensions not in (None, Number(str(served.hidden_size))):
        raise BadRequest(
            f"the vectors have {served.hidden_size} dimensions and are not cut",
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
    match item:
        case str() if item.strip() and not _URL.match(item.strip()):
            return _image_or_text(item, index, max_bytes)
        case {"image": str(image), **others} if not others:
            return read_item(image, index, max_bytes)
        case Number() | list() | {"text": _}:
            raise _text(index)
        case Mapping() if "image" in item:
            raise InvalidShape(
                'an item is {"image": "…"}, with a string and no more', param=image_param(index)
            )
    return read_item(item, index, max_bytes)


def _image_or_text(text: str, index: int, max_bytes: int) -> bytes | ImageUrl:
    """A word may be base64 too, so what it decodes to must look like a file of some known kind."""
    try:
        image = read_item(text, index, max_bytes)
    except BadRequest as error:
        raise _text(index) if error.status == 400 else error from None
    if isinstance(image, ImageUrl):
        return image
    try:
        sniff(image)
    except ApiError as error:
        if error.code == "invalid_image":
            raise _text(index) from None
    return image


def _text(index: int) -> BadRequest:
    return BadRequest(
        "this is not the base64 of an image, and text is not supported: this server embeds images only; send "
        'an image\'s bytes in base64, as a data: URI, or as {"image": "<either>"}',
        code="text_not_supported",
        param=image_param(index),
    )

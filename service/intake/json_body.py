"""The JSON form of a body of `/embed`, `{"images": [item, …], …options}`, and what all JSON bodies share.

Knows the shape of the document; how an image is written as text is `inline_images`' affair.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVarTuple

from service.errors import ApiError, BadRequest, InvalidShape, image_param, printable
from service.fetching.image_urls import ImageUrl
from service.intake.embed_body import BodyLimits, EmbedBody, RunBlocking, check_images, too_many_images
from service.intake.inline_images import decode_base64, decode_item, decode_url
from service.intake.options import FLAGS, OPTION_NAMES

Ts = TypeVarTuple("Ts")

# Larger documents are parsed off the event loop; below this a hop to another thread costs more.
MAX_INLINE_BYTES = 2**16
# A body full of tiny values would take many times its size in memory. Base64 has none of these characters.
_MAX_STRUCTURAL_CHARS = 100_000


class JsonForm(Generic[*Ts]):
    """Collects a document, and has it parsed by `parse(chunks, *arguments)` once it is complete."""

    def __init__(self, parse: Callable[[list[bytes], *Ts], EmbedBody], *arguments: *Ts) -> None:
        self._parse = parse
        self._arguments = arguments
        self._chunks: list[bytes] = []
        self._num_bytes = 0

    def feed(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._num_bytes += len(chunk)

    async def finish(self, run_blocking: RunBlocking) -> EmbedBody:
        if self._num_bytes > MAX_INLINE_BYTES:
            return await run_blocking(self._parse, self._chunks, *self._arguments)
        return self._parse(self._chunks, *self._arguments)


def parse_json_body(chunks: list[bytes], limits: BodyLimits) -> EmbedBody:
    """Parses the document and decodes its images, as `load_object` and `read_images` do."""
    document = load_object(chunks, '{"images": ["<base64>"]}')
    for name in document:
        if name not in ("images", *OPTION_NAMES):
            raise InvalidShape(f"unknown member {printable(name)}", param=printable(name))
    images = document.pop("images", None)
    if images is None:
        raise InvalidShape("the member images is missing", param="images")
    options = {name: _option(name, value) for name, value in document.items() if value is not None}
    return EmbedBody(read_images(images, limits, read_item), options)


@dataclass(frozen=True, slots=True)
class Number:
    """A number of a document, as it stands there: no digit of it costs time."""

    text: str


def load_object(chunks: list[bytes], example: str) -> dict[str, object]:
    """The document, which must be an object such as `example`. Raises `BadRequest` and `InvalidShape`.

    Empties `chunks`, so that a large body is not held twice.
    """
    body = b"".join(chunks)
    chunks.clear()
    document = _load_json(body)
    if not isinstance(document, dict):
        raise InvalidShape(f"the body must be an object such as {example}")
    return document


def _load_json(body: bytes) -> object:
    """The document, each number in it a `Number`. Raises `BadRequest`.

    The largest body holds the interpreter lock for about 0.1 s. orjson holds it as long, as most of that is
    the copy of a string, and lets a member stand twice.
    """
    if sum(body.count(char) for char in (b",", b"[", b"{")) > _MAX_STRUCTURAL_CHARS:
        raise BadRequest("the JSON has far more values than any request needs", code="invalid_json")
    try:
        return json.loads(
            body.decode("utf-8-sig"),
            object_pairs_hook=_object,
            parse_int=Number,
            parse_float=Number,
            parse_constant=_refuse_constant,
        )
    except UnicodeDecodeError:
        raise BadRequest("the JSON is not UTF-8", code="invalid_json") from None
    except RecursionError:
        raise BadRequest("the JSON is nested too deeply", code="invalid_json") from None
    except json.JSONDecodeError as error:
        message = f"malformed JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        raise BadRequest(message, code="invalid_json") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise BadRequest("a member stands twice in one JSON object", code="invalid_json")
    return members


def _refuse_constant(text: str) -> NoReturn:
    raise BadRequest(f"{text} is not JSON", code="invalid_json")


def _option(name: str, value: object) -> str | bool:
    """The value of an option as a query would state it: the numbers 1 and 0 are booleans, too."""
    if isinstance(value, str | bool):
        return value
    if name in FLAGS and isinstance(value, Number):
        return value.text
    raise InvalidShape(f"{name} must be a {'boolean' if name in FLAGS else 'string'}", param=name)


def read_images(
    value: object, limits: BodyLimits, read: Callable[[object, int, int], bytes | ImageUrl]
) -> tuple[bytes | ImageUrl, ...]:
    """The images of a list, or of one item that stands without it. `read` is as `read_item`.

    Raises `TooLarge` where there are too many, `BadRequest` where there is none, and what `read` raises.
    """
    items = value if isinstance(value, list) else [value]
    if len(items) > limits.max_images:
        raise too_many_images(limits)
    return check_images([read(item, index, limits.max_image_bytes) for index, item in enumerate(items)])


def read_item(item: object, index: int, max_bytes: int) -> bytes | ImageUrl:
    """The image that an item of a document is. Raises `ApiError`, which names it by `index`."""
    try:
        return _decode(item, max_bytes)
    except ApiError as error:
        error.param = image_param(index)
        raise


def _decode(item: object, max_bytes: int) -> bytes | ImageUrl:
    match item:
        case str():
            return decode_item(item, max_bytes)
        case {"data": str(data), **others} if not others:
            return decode_base64(data, max_bytes)
        case {"url": str(url), **others} if not others:
            return decode_url(url, max_bytes)
    raise InvalidShape('an image must be a string, {"data": "<base64>"} or {"url": "…"}' + _unknown(item))


def _unknown(item: object) -> str:
    """Names the members that an item should not have, for the error's message."""
    names = (
        [printable(name) for name in item if name not in ("data", "url")] if isinstance(item, Mapping) else []
    )
    return f"; unknown: {', '.join(names[:3])}" if names else ""

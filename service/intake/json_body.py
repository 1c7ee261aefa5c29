"""Reads the JSON body of `/embed`: `{"images": [item, …], …options}`. `/v1/embeddings` shares its functions.

Knows the shape of the document; `inline_images` knows how an image is written as text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar, TypeVarTuple

from service.errors import ApiError, BadRequest, InvalidShape, image_param, printable
from service.fetching.image_urls import ImageUrl
from service.intake.embed_body import BodyLimits, EmbedBody, RunBlocking, check_images, too_many_images
from service.intake.inline_images import decode_base64, decode_item, decode_url
from service.intake.options import FLAGS, OPTION_NAMES

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

# Larger documents are parsed off the event loop. For smaller ones a hop to another thread costs more.
MAX_INLINE_BYTES = 2**16
# A body full of tiny values would take many times its size in memory. Base64 has none of these characters.
_MAX_STRUCTURAL_CHARS = 100_000


class JsonReader(Generic[R, *Ts]):
    """Collects the bytes of a document and calls `parse(chunks, *arguments)` once it is complete."""

    def __init__(self, parse: Callable[[list[bytes], *Ts], R], *arguments: *Ts) -> None:
        self._parse = parse
        self._arguments = arguments
        self._chunks: list[bytes] = []
        self._num_bytes = 0

    def feed(self, chunk: bytes) -> None:
        """Keeps the next bytes."""
        self._chunks.append(chunk)
        self._num_bytes += len(chunk)

    async def finish(self, run_blocking: RunBlocking) -> R:
        """Parses the document, a large one through `run_blocking`. Raises what `parse` raises."""
        if self._num_bytes > MAX_INLINE_BYTES:
            return await run_blocking(self._parse, self._chunks, *self._arguments)
        return self._parse(self._chunks, *self._arguments)


def parse_json_body(chunks: list[bytes], limits: BodyLimits) -> EmbedBody:
    """Parses the document and decodes its images, as `load_object` and `read_images` do."""
    document = load_object(chunks, '{"images": ["<base64>"]}')
    for name in document:
        if name not in ("images", *OPTION_NAMES):
            raise InvalidShape(
                f"unknown member {printable(name)}; the members are images and {', '.join(OPTION_NAMES)}",
                param=printable(name),
            )
    images = document.pop("images", None)
    if images is None:
        raise InvalidShape("the member images is missing", param="images")
    options = {name: _option(name, value) for name, value in document.items() if value is not None}
    return EmbedBody(read_images(images, limits, read_item), options)


@dataclass(frozen=True, slots=True)
class JsonNumber:
    """A number of a document as text, such as `1` or `2.5e3`: converting thousands of digits takes time."""

    text: str


def load_object(chunks: list[bytes], example: str) -> dict[str, object]:
    """Parses the document. Raises `BadRequest` if it is malformed, `InvalidShape` if it is not an object.

    Empties `chunks`, so that a large body is not held twice. The error quotes `example`.
    """
    body = b"".join(chunks)
    chunks.clear()
    document = _load_json(body)
    if not isinstance(document, dict):
        raise InvalidShape(f"the body must be an object such as {example}")
    return document


def _load_json(body: bytes) -> object:
    """Parses the document; each number becomes a `JsonNumber`. Raises `BadRequest`.

    The largest body holds the interpreter lock for about 0.1 s. orjson holds it as long, because most of the
    time goes into copying a string, and orjson accepts a member that stands twice.
    """
    if sum(body.count(char) for char in (b",", b"[", b"{")) > _MAX_STRUCTURAL_CHARS:
        raise BadRequest(
            f"the JSON has more than {_MAX_STRUCTURAL_CHARS} commas and brackets", code="invalid_json"
        )
    try:
        return json.loads(
            body.decode("utf-8-sig"),
            object_pairs_hook=_object,
            parse_int=JsonNumber,
            parse_float=JsonNumber,
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
        raise BadRequest("a JSON object has the same member twice", code="invalid_json")
    return members


def _refuse_constant(text: str) -> NoReturn:
    raise BadRequest(f"{text} is not JSON", code="invalid_json")


def _option(name: str, value: object) -> str | bool:
    """The value of an option as `resolve_options` takes it: a number becomes the text that a query has."""
    if isinstance(value, str | bool):
        return value
    if name in FLAGS and isinstance(value, JsonNumber):
        return value.text
    raise InvalidShape(f"{name} must be a {'boolean' if name in FLAGS else 'string'}", param=name)


def read_images(
    value: object, limits: BodyLimits, read: Callable[[object, int, int], bytes | ImageUrl]
) -> tuple[bytes | ImageUrl, ...]:
    """Reads the images of a list, or the single image that may stand without a list, by `read`.

    `read` has the type of `read_item`. Raises `TooLarge` for too many images, `BadRequest` for none, and
    what `read` raises.
    """
    items = value if isinstance(value, list) else [value]
    if len(items) > limits.max_images:
        raise too_many_images(limits)
    return check_images([read(item, index, limits.max_image_bytes) for index, item in enumerate(items)])


def read_item(item: object, index: int, max_bytes: int) -> bytes | ImageUrl:
    """The bytes or the URL of the image in an item. Raises `ApiError`, which names the image by `index`."""
    try:
        return _decode(item, max_bytes)
    except ApiError as error:
        error.param = image_param(index)
        raise


def without_nulls(item: object, names: Collection[str]) -> object:
    """The item without its members among `names` that are null: these count as missing."""
    if not isinstance(item, Mapping):
        return item
    return {name: value for name, value in item.items() if value is not None or name not in names}


def _decode(item: object, max_bytes: int) -> bytes | ImageUrl:
    item = without_nulls(item, ("data", "url"))
    match item:
        case str():
            return decode_item(item, max_bytes)
        case {"data": str(data), **others} if not others:
            return decode_base64(data, max_bytes)
        case {"url": str(url), **others} if not others:
            return decode_url(url, max_bytes)
    raise InvalidShape(f'an image must be a string, {{"data": "<base64>"}} or {{"url": "…"}}{_unknown(item)}')


def _unknown(item: object) -> str:
    """Names the members that an item should not have, for the error's message."""
    if not isinstance(item, Mapping):
        return ""
    names = [printable(name) for name in item if name not in ("data", "url")]
    return f"; unknown: {', '.join(names[:3])}" if names else ""

"""Finds the images in the JSON of a chat, and puts the uuids of their tokens in their place.

Only the content parts that are images are written anew. All other bytes stay as they came: the order of
members, the spelling of numbers, members that stand twice. Knows the shape of chats as vLLM reads it; nothing
of HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from service.chat.json_scanner import Scanner
from service.errors import ApiError, BadRequest, image_param
from service.fetching.image_urls import ImageUrl
from service.handoff.entry import Entry
from service.intake.embed_body import BodyLimits, Images, too_many_images
from service.intake.inline_images import decode_url


@dataclass(frozen=True)
class ChatForm:
    """Where the content parts of a chat stand: in lists of the members of a list."""

    messages: str  # the member of the body that is the list of messages
    parts: Collection[str]  # the members of a message that are lists of parts
    takes_tokens: bool  # whether vLLM takes tokens in place of images


CHAT = ChatForm("messages", ("content",), takes_tokens=True)
# vLLM 0.32 and 0.33 check the parts of `/v1/responses` against OpenAI's types, which know no `image_embeds`.
RESPONSES = ChatForm("input", ("content", "output"), takes_tokens=False)

# They change how vLLM prepares an image, and then vLLM does not look for its tokens under the uuid.
_KWARGS = ("mm_processor_kwargs", "media_io_kwargs")
_IMAGE_TYPES = ("image_url", "input_image")
# Members of an image part that the new part has in its own form, or that vLLM would read in place of it.
_REPLACED = frozenset({"type", "uuid", "image_url", "image_pil", "image_embeds"})
# A body full of tiny values would take many times its size in memory.
_MAX_STRUCTURAL_CHARS = 1_000_000


@dataclass(frozen=True)
class _ImagePart:
    """A content part that is an image, from `start` to `stop` in the text."""

    start: int
    stop: int
    url: str
    others: Sequence[str]  # its members that stay, as they came


@dataclass
class _Found:
    is_chat: bool = False
    parts: list[_ImagePart] = field(default_factory=list)
    kwargs: list[str] = field(default_factory=list)  # names of `_KWARGS` that have a value


@dataclass(frozen=True)
class ChatBody:
    """The body of a chat and the images in it, in order."""

    body: bytes  # as it came
    images: Images = ()
    _text: str = ""
    _parts: Sequence[_ImagePart] = ()

    def with_entries(self, entries: Sequence[Entry]) -> bytes:
        """The body for the LLM server. `entries` are those of the images."""
        pieces = []
        end = 0
        for part, entry in zip(self._parts, entries, strict=True):
            pieces += [self._text[end : part.start], _tokens_part(entry, part.others)]
            end = part.stop
        return "".join([*pieces, self._text[end:]]).encode()


def parse_chat(chunks: list[bytes], form: ChatForm, limits: BodyLimits) -> ChatBody:
    """Finds and decodes the images. Empties `chunks`, so that a large body is not held twice.

    Raises `ApiError` for images that cannot be embedded as the LLM server would, and for JSON that may hold
    images but cannot be read: the LLM server must not find an image that was not found here.
    """
    body = _join(chunks)
    if not _may_hold_images(body):
        return ChatBody(body)
    text, found = _scan(body, form)
    if not found.parts:
        return ChatBody(body)
    _check(found, form, limits)
    images = tuple(_decode(part.url, index, limits) for index, part in enumerate(found.parts))
    return ChatBody(body, images, text, found.parts)


def find_messages(chunks: list[bytes]) -> tuple[bytes, bool]:
    """The body, and whether it has messages: whether it is a chat. Empties `chunks`."""
    body = _join(chunks)
    if b'"messages"' not in body:
        return body, False
    try:
        return body, _scan(body, CHAT)[1].is_chat
    except BadRequest:
        return body, False


def _join(chunks: list[bytes]) -> bytes:
    body = b"".join(chunks)
    chunks.clear()
    return body


def _may_hold_images(body: bytes) -> bool:
    """False for most bodies without images. Letters may be escaped, or be in UTF-16 or UTF-32."""
    return b"image" in body or b"\\u00" in body or b"\0" in body


def _check(found: _Found, form: ChatForm, limits: BodyLimits) -> None:
    """Raises `BadRequest` if the images cannot be embedded for the LLM server."""
    if not form.takes_tokens:
        raise BadRequest(
            "this route takes no images; send them to /v1/chat/completions",
            code="invalid_option",
            param=form.messages,
        )
    for name in found.kwargs:
        raise BadRequest(
            f"{name} cannot apply to images, which are embedded before the LLM server sees them",
            code="option_conflict",
            param=name,
        )
    if len(found.parts) > limits.max_images:
        raise too_many_images(limits)


def _decode(url: str, index: int, limits: BodyLimits) -> bytes | ImageUrl:
    try:
        image = decode_url(url, limits.max_image_bytes)
    except ApiError as error:
        error.param = image_param(index)
        raise
    if not image:
        raise BadRequest("the image is empty", code="empty_input", param=image_param(index))
    return image


def _tokens_part(entry: Entry, others: Sequence[str]) -> str:
    """The part that takes the place of an image, with the members that stay."""
    part = {
        "type": "image_embeds",
        "uuid": entry.uuid,
        "image_embeds": {"image_grid_thw": entry.grid_thw},
    }
    members = json.dumps(part, separators=(",", ":"))
    return members if not others else f"{members[:-1]},{','.join(others)}}}"


def _scan(body: bytes, form: ChatForm) -> tuple[str, _Found]:
    """The text of the body, and what is found in it. Raises `BadRequest` if it cannot be read."""
    if len(body) > _MAX_STRUCTURAL_CHARS < sum(body.count(char) for char in (b",", b"[", b"{")):
        raise _unreadable(f"it has more than {_MAX_STRUCTURAL_CHARS} commas and brackets")
    try:
        text = body.decode()
        return text, _find(Scanner(text), form)
    except UnicodeDecodeError:
        raise _unreadable("it is not UTF-8") from None
    except RecursionError:
        raise _unreadable("it is nested too deeply") from None
    except ValueError as error:
        raise _unreadable(str(error)) from None


def _unreadable(reason: str) -> BadRequest:
    return BadRequest(f"the JSON cannot be read: {reason}", code="invalid_json")


def _find(scanner: Scanner, form: ChatForm) -> _Found:
    found = _Found()
    if not scanner.is_at("{"):
        scanner.value()
        scanner.finish()
        return found
    for name in scanner.members():
        if name == form.messages and scanner.is_at("["):
            found.is_chat = True
            for _ in scanner.items():
                _find_in_message(scanner, form, found)
        elif scanner.value() and name in _KWARGS:
            found.kwargs.append(name)
    scanner.finish()
    return found


def _find_in_message(scanner: Scanner, form: ChatForm, found: _Found) -> None:
    if not scanner.is_at("{"):
        scanner.value()
        return
    for name in scanner.members():
        if name not in form.parts or not scanner.is_at("["):
            scanner.value()
            continue
        for _ in scanner.items():
            part = _image_part(scanner)
            if part is not None:
                found.parts.append(part)


def _image_part(scanner: Scanner) -> _ImagePart | None:
    """Passes a content part. Returns it if it is an image with a URL."""
    start = scanner.at
    if not scanner.is_at("{"):
        scanner.value()
        return None
    values: dict[str, object] = {}
    others = []
    for name in scanner.members():
        at = scanner.at
        values[name] = scanner.value()
        if name not in _REPLACED:
            others.append(f"{json.dumps(name)}:{scanner.text[at : scanner.at]}")
    url = _image_url(values)
    return _ImagePart(start, scanner.at, url, others) if url else None


def _image_url(part: dict[str, object]) -> str | None:
    """The URL of a part, if vLLM would read the part as an image with a URL.

    vLLM goes by the type, but by the members if there is no type, or a uuid. Parts without a URL are errors
    that the LLM server explains.
    """
    if part.get("type") is not None and part.get("uuid") is None and part["type"] not in _IMAGE_TYPES:
        return None
    url = part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    return url if isinstance(url, str) else None

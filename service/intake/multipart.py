"""Reads a multipart body: parts with images and parts with options.

Knows the headers of parts; `python_multipart` finds the bytes between the boundaries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from service.errors import BadRequest, printable
from service.intake.content_type import is_image_type
from service.intake.embed_body import (
    BodyLimits,
    EmbedBody,
    RunBlocking,
    image_too_large,
    join_images,
    too_many_images,
)
from service.intake.options import OPTION_NAMES

_BOUNDARY = re.compile(rb"[ -~]{0,69}[!-~]")  # RFC 2046 allows 70 characters, the last one no space
_MAX_TEXT_BYTES = 256  # of an option or of a button's text
_MAX_IGNORED_PARTS = 64  # each part costs about 50 µs
_MAX_PREAMBLE_BYTES = 4096
# The library takes about a microsecond for each semicolon. File names have a few.
_MAX_SEMICOLONS = 64
# This pattern never fails after its first quote, so that no quote is looked at twice: a string that is not
# closed extends to the end.
_QUOTED = re.compile(rb'"(?:[^"\\]|\\.?)*+"?', re.DOTALL)
_EXTENDED_FILE_NAME = re.compile(rb";\s*filename\*[0-9]*\*?\s*=", re.IGNORECASE)
_IDENTITY_ENCODINGS = (b"", b"binary", b"8bit", b"7bit")
# Names that pages give to submit buttons. None of them is near the name of an option, so that a misspelt
# option is never taken for a button.
_BUTTON_NAME = re.compile(r".*(submit|button|btn).*|send|upload|commit", re.IGNORECASE | re.DOTALL)


@dataclass
class _Part:
    """A part while it arrives. `name` is that of an option or a button."""

    headers: dict[bytes, bytes] = field(default_factory=dict)  # by lower-case name
    header_name: bytes = b""
    header_value: bytes = b""
    kind: Literal["image", "option", "button"] = "image"
    name: str = ""
    is_empty_input: bool = False  # a file input without a file; becomes False if bytes arrive
    chunks: list[bytes] = field(default_factory=list)
    num_bytes: int = 0


class MultipartReader:
    """Sorts the parts into images and options while they arrive.

    It ignores two kinds of parts that the HTML form of a page sends: file inputs without a file, and the
    submit button.
    """

    def __init__(self, boundary: bytes, limits: BodyLimits) -> None:
        if not _BOUNDARY.fullmatch(boundary):
            message = "multipart/form-data needs a boundary of 1 to 70 characters in the Content-Type header"
            raise BadRequest(message, code="invalid_body")
        self._limits = limits
        self._images: list[list[bytes]] = []  # each in its chunks
        self._options: dict[str, str | bool] = {}
        self._num_ignored = 0
        self._part = _Part()
        self._is_complete = False
        self._delimiter = b"\r\n--" + boundary
        self._preamble: bytes | None = b"\r\n"  # None after the first boundary, which may begin the body
        # The parser limits the number of a part's headers and the size of each.
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._add_header_name,
                "on_header_value": self._add_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def feed(self, chunk: bytes) -> None:
        """Takes the next bytes. Raises `ApiError` as soon as the body is malformed or passes a limit."""
        if self._preamble is not None:
            chunk = self._skip_preamble(self._preamble + chunk)
        try:
            self._parser.write(chunk)
        except FormParserError:
            message = "malformed multipart body: a boundary or the headers of a part cannot be read"
            raise BadRequest(message, code="invalid_body") from None

    def _skip_preamble(self, data: bytes) -> bytes:
        """Returns `data` from the first boundary on. Source: RFC 2046, section 5.1.1."""
        start = data.find(self._delimiter, 0, _MAX_PREAMBLE_BYTES)
        if start >= 0:
            self._preamble = None
            return data[start + 2 :]
        if len(data) >= _MAX_PREAMBLE_BYTES:
            raise BadRequest("the multipart body does not begin with its boundary", code="invalid_body")
        self._preamble = data
        return b""

    async def finish(self, run_blocking: RunBlocking) -> EmbedBody:
        """Returns the images and options of the whole body. Raises `BadRequest` if it is not complete."""
        if not self._is_complete:
            raise BadRequest("the multipart body ends before its last boundary", code="invalid_body")
        return EmbedBody(await join_images(self._images, run_blocking), self._options)

    def _begin_part(self) -> None:
        self._part = _Part()

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._part.header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._part.header_value += data[start:end]

    def _end_header(self) -> None:
        part = self._part
        part.headers[part.header_name.lower()] = part.header_value
        part.header_name = part.header_value = b""

    def _end_headers(self) -> None:
        part = self._part
        _check_transfer_encoding(part.headers)
        media_type, _ = _parse(part.headers, b"content-type")
        _, parameters = _parse(part.headers, b"content-disposition")
        if is_image_type(media_type) or _has_file_name(part.headers, parameters):
            part.is_empty_input = parameters.get(b"filename") == b""
            if not part.is_empty_input:
                self._check_num_images()
            return
        part.name = parameters.get(b"name", b"").decode("utf-8", "replace")
        part.kind = self._kind_of(part.name)

    def _check_num_images(self) -> None:
        """Raises `TooLarge` if the request has no place for one image more."""
        if len(self._images) == self._limits.max_images:
            raise too_many_images(self._limits)

    def _kind_of(self, name: str) -> Literal["option", "button"]:
        """Tells options and buttons apart by name. Raises `BadRequest` if that is unknown or repeated."""
        if name in self._options:
            raise BadRequest(f"option {name} is given twice", code="invalid_option", param=name)
        if name in OPTION_NAMES:
            return "option"
        if _BUTTON_NAME.fullmatch(name):
            return "button"
        shown = printable(name)
        raise BadRequest(
            f"part {shown or 'without a name'} is neither an image nor an option: an image has a file name "
            f"or an image type (curl -F image=@photo.jpg), and the options are {', '.join(OPTION_NAMES)}",
            code="invalid_option",
            param=shown or None,
        )

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        part = self._part
        if part.is_empty_input and end > start:
            part.is_empty_input = False
            self._check_num_images()
        part.num_bytes += end - start
        if part.kind == "image":
            if part.num_bytes > self._limits.max_image_bytes:
                raise image_too_large(self._limits, len(self._images))
        elif part.num_bytes > _MAX_TEXT_BYTES:
            raise BadRequest(
                f"{part.kind} {printable(part.name)} has more than {_MAX_TEXT_BYTES} bytes",
                code="invalid_option",
                param=printable(part.name),
            )
        part.chunks.append(data[start:end])

    def _end_part(self) -> None:
        part = self._part
        if part.kind == "button" or part.is_empty_input:
            self._ignore_part()
        elif part.kind == "image":
            self._images.append(part.chunks)
        else:
            self._options[part.name] = _option_value(part)

    def _ignore_part(self) -> None:
        self._num_ignored += 1
        if self._num_ignored > _MAX_IGNORED_PARTS:
            message = f"the form has more than {_MAX_IGNORED_PARTS} empty file inputs and buttons"
            raise BadRequest(message, code="invalid_body")

    def _end(self) -> None:
        self._is_complete = True


def _option_value(part: _Part) -> str:
    try:
        return b"".join(part.chunks).decode()
    except UnicodeDecodeError:
        message = f"option {part.name} is not UTF-8"
        raise BadRequest(message, code="invalid_option", param=part.name) from None


def _check_transfer_encoding(headers: Mapping[bytes, bytes]) -> None:
    encoding = headers.get(b"content-transfer-encoding", b"").strip().lower()
    if encoding not in _IDENTITY_ENCODINGS:
        shown = printable(encoding.decode("latin-1"))
        raise BadRequest(
            f"a part has transfer encoding {shown}, which is not served; send its bytes as they are",
            code="invalid_body",
        )


def _parse(headers: Mapping[bytes, bytes], name: bytes) -> tuple[bytes, Mapping[bytes, bytes]]:
    """The value of a part's header, in lower case, and its parameters."""
    header = headers.get(name, b"")
    if header.count(b";") > _MAX_SEMICOLONS:
        message = f"the {name.decode()} of a part has more than {_MAX_SEMICOLONS} semicolons"
        raise BadRequest(message, code="invalid_body")
    value, parameters = parse_options_header(header)
    return value, parameters


def _has_file_name(headers: Mapping[bytes, bytes], parameters: Mapping[bytes, bytes]) -> bool:
    """Whether a part has a file name, even an empty one. `parameters` are those of its disposition."""
    disposition = headers.get(b"content-disposition", b"")
    # The library ignores `filename*=`, which RFC 7578 forbids and some clients send all the same.
    return b"filename" in parameters or _EXTENDED_FILE_NAME.search(_QUOTED.sub(b"", disposition)) is not None

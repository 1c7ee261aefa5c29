"""The multipart form of a body: parts with images and parts with options.

Knows the headers of parts; the bytes between boundaries are found by `python_multipart`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

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
_MAX_OPTION_BYTES = 256
_MAX_PREAMBLE_BYTES = 4096
# The library takes about a microsecond for each semicolon. File names have a few.
_MAX_SEMICOLONS = 64
# Never fails once it began, so that no quote is looked at twice: one that is not closed goes on to the end.
_QUOTED = re.compile(rb'"(?:[^"\\]|\\.?)*+"?', re.DOTALL)
_EXTENDED_FILE_NAME = re.compile(rb";\s*filename\*[0-9]*\*?\s*=", re.IGNORECASE)
_IDENTITY_ENCODINGS = (b"", b"binary", b"8bit", b"7bit")


@dataclass
class _Part:
    """A part while it arrives. `option` is its name if it holds an option; else it holds an image."""

    headers: dict[bytes, bytes] = field(default_factory=dict)  # by lower-case name
    header_name: bytes = b""
    header_value: bytes = b""
    option: str | None = None
    chunks: list[bytes] = field(default_factory=list)
    num_bytes: int = 0


class MultipartForm:
    """Sorts the parts into images and options while they arrive."""

    def __init__(self, boundary: bytes, limits: BodyLimits) -> None:
        if not _BOUNDARY.fullmatch(boundary):
            message = "multipart/form-data needs a boundary of 1 to 70 characters in the Content-Type header"
            raise BadRequest(message, code="invalid_body")
        self._limits = limits
        self._images: list[list[bytes]] = []  # each in its chunks
        self._options: dict[str, str | bool] = {}
        self._part = _Part()
        self._complete = False
        self._delimiter = b"\r\n--" + boundary
        self._preamble: bytes | None = b"\r\n"  # until the first boundary, which may begin the body
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
        if self._preamble is not None:
            chunk = self._skip_preamble(self._preamble + chunk)
        try:
            self._parser.write(chunk)
        except FormParserError:
            message = "malformed multipart body: a boundary or the headers of a part cannot be read"
            raise BadRequest(message, code="invalid_body") from None

    def _skip_preamble(self, data: bytes) -> bytes:
        """What comes from the first boundary on. Source: RFC 2046, section 5.1.1."""
        start = data.find(self._delimiter, 0, _MAX_PREAMBLE_BYTES)
        if start >= 0:
            self._preamble = None
            return data[start + 2 :]
        if len(data) >= _MAX_PREAMBLE_BYTES:
            raise BadRequest("the multipart body does not begin with its boundary", code="invalid_body")
        self._preamble = data
        return b""

    async def finish(self, run_blocking: RunBlocking) -> EmbedBody:
        if not self._complete:
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
        headers = self._part.headers
        transfer_encoding = headers.get(b"content-transfer-encoding", b"").strip().lower()
        if transfer_encoding not in _IDENTITY_ENCODINGS:
            shown = printable(transfer_encoding.decode("latin-1"))
            raise BadRequest(
                f"send parts as they are, not with transfer encoding {shown}", code="invalid_body"
            )
        media_type, _ = _parse(headers, b"content-type")
        _, parameters = _parse(headers, b"content-disposition")
        if not (is_image_type(media_type) or _has_file_name(headers, parameters)):
            self._part.option = self._option_name(parameters)
        elif len(self._images) == self._limits.max_images:
            raise too_many_images(self._limits)

    def _option_name(self, parameters: Mapping[bytes, bytes]) -> str:
        name: str = parameters.get(b"name", b"").decode("utf-8", "replace")
        shown = printable(name)
        if name not in OPTION_NAMES:
            message = (
                f"part {shown or 'without a name'} is neither an image (with a file name or an image type) "
                f"nor an option ({', '.join(OPTION_NAMES)})"
            )
            raise BadRequest(message, code="invalid_option", param=shown or None)
        if name in self._options:
            raise BadRequest(f"option {name} is given twice", code="invalid_option", param=name)
        return name

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        part = self._part
        part.num_bytes += end - start
        if part.option is None:
            if part.num_bytes > self._limits.max_image_bytes:
                raise image_too_large(self._limits, len(self._images))
        elif part.num_bytes > _MAX_OPTION_BYTES:
            message = f"option {part.option} has more than {_MAX_OPTION_BYTES} bytes"
            raise BadRequest(message, code="invalid_option", param=part.option)
        part.chunks.append(data[start:end])

    def _end_part(self) -> None:
        part = self._part
        if part.option is None:
            self._images.append(part.chunks)
            return
        try:
            self._options[part.option] = b"".join(part.chunks).decode()
        except UnicodeDecodeError:
            message = f"option {part.option} is not UTF-8"
            raise BadRequest(message, code="invalid_option", param=part.option) from None

    def _end(self) -> None:
        self._complete = True


def _parse(headers: Mapping[bytes, bytes], name: bytes) -> tuple[bytes, Mapping[bytes, bytes]]:
    """The value of a part's header, in lower case, and its parameters."""
    header = headers.get(name, b"")
    if header.count(b";") > _MAX_SEMICOLONS:
        message = f"the {name.decode()} of a part has more than {_MAX_SEMICOLONS} semicolons"
        raise BadRequest(message, code="invalid_body")
    value, parameters = parse_options_header(header)
    return value, parameters


def _has_file_name(headers: Mapping[bytes, bytes], parameters: Mapping[bytes, bytes]) -> bool:
    """Whether a part has a file name, even an empty one; `parameters` are those of its disposition."""
    disposition = headers.get(b"content-disposition", b"")
    # The library ignores `filename*=`, which RFC 7578 forbids and some clients send all the same.
    return b"filename" in parameters or _EXTENDED_FILE_NAME.search(_QUOTED.sub(b"", disposition)) is not None

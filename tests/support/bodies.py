"""Bodies of `POST /embed`, and a function that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar, TypeVarTuple

from service.intake.body import embed_reader, read_body
from service.intake.content_type import parse_content_type
from service.intake.embed_body import BodyLimits, EmbedBody

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
LIMITS = BodyLimits(max_body_bytes=300_000, max_image_bytes=1000, max_images=3, timeout_s=5.0)
BOUNDARY = b"xYz--7"
MULTIPART = f"multipart/form-data; boundary={BOUNDARY.decode()}"
IMAGE_HEADERS = b'Content-Disposition: form-data; name="a"; filename="a.jpg"\r\nContent-Type: image/jpeg'


async def run_inline(fn: Callable[[*Ts], T], /, *args: *Ts) -> T:
    """Stands in for a thread pool."""
    return fn(*args)


async def stream(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def read(content_type: str | None, *chunks: bytes, limits: BodyLimits = LIMITS) -> EmbedBody:
    """Reads a body of `/embed` that arrives in these chunks."""
    reader = embed_reader(parse_content_type(content_type), limits)
    return asyncio.run(read_body(reader, stream(chunks), limits, run_inline))


def part(headers: bytes, data: bytes) -> bytes:
    return b"--" + BOUNDARY + b"\r\n" + headers + b"\r\n\r\n" + data + b"\r\n"


def option_part(name: str, value: bytes) -> bytes:
    return part(f'Content-Disposition: form-data; name="{name}"'.encode(), value)


def image_part(data: bytes) -> bytes:
    return part(IMAGE_HEADERS, data)


def multipart(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--" + BOUNDARY + b"--\r\n"

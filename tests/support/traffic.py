"""Callers on sockets of their own, who stay for their answer or leave, and what the metrics say then."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
from PIL import Image

GAUGES_AT_REST = ("queue_images", "queue_tokens", "inflight_bytes")  # 0 once nothing is asked for


class NoAnswer(Exception):
    """The server closed the connection without one."""


@dataclass(frozen=True)
class Answer:
    """What one caller got."""

    status: int
    headers: httpx.Headers
    body: Any

    @property
    def code(self) -> str | None:
        """Of the error, if it is one."""
        return None if self.status == 200 else self.body["error"]["code"]

    @property
    def embeddings(self) -> list[list[float]]:
        return [entry["embedding"] for entry in self.body["data"]]


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A file of an array [height, width, 3]."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def post(*images: bytes, query: str = "") -> bytes:
    """The bytes of a request for one image as it is, or for several in a form."""
    if len(images) == 1:
        headers = {"content-type": "application/octet-stream"}
        request = httpx.Request("POST", f"http://sidecar/embed{query}", content=images[0], headers=headers)
    else:
        files = [("image", ("image", image, "image/png")) for image in images]
        request = httpx.Request("POST", f"http://sidecar/embed{query}", files=files)
    return as_bytes(request)


def as_bytes(request: httpx.Request) -> bytes:
    lines = [f"{name}: {value}" for name, value in request.headers.items()]
    head = "\r\n".join(
        [f"{request.method} {request.url.raw_path.decode()} HTTP/1.1", *lines, "connection: close"]
    )
    return head.encode() + b"\r\n\r\n" + request.read()


async def call(port: int, request: bytes) -> Answer:
    """Sends a request and reads until the server closes. Anything but one whole answer fails."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        raw = await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    head, end, body = raw.partition(b"\r\n\r\n")
    if not raw:
        raise NoAnswer
    assert end, f"a part of an answer: {raw[:80]!r}"
    lines = [line.partition(b": ") for line in head.split(b"\r\n")[1:]]
    headers = httpx.Headers([(name, value) for name, _, value in lines])
    assert len(body) == int(headers["content-length"]), "an answer has one body, whole"
    return Answer(int(head[9:12]), headers, json.loads(body))


async def leave(port: int, request: bytes, *, num_bytes: int, wait_s: float, reset: bool) -> None:
    """Sends a part of a request, its headers at least, or all of it, and is gone a moment later."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    num_head_bytes = request.index(b"\r\n\r\n") + 4
    writer.write(request[: max(num_bytes, num_head_bytes)])
    await writer.drain()
    await asyncio.sleep(wait_s)
    if reset:
        writer.transport.abort()
    else:
        writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


class Scrape:
    """The samples of one look at `/metrics`, without our prefix."""

    def __init__(self, text: str) -> None:
        lines = re.findall(r"^(?:vision_sidecar_)?(\w+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE)
        self.samples = [(name, labels, float(value)) for name, labels, value in lines]

    def total(self, name: str, labels: str = "") -> float:
        """The sum of a metric's series whose labels hold that text."""
        values = [value for found, given, value in self.samples if found == name and labels in given]
        assert values, f"no sample {name} {labels}"
        return sum(values)

    def statuses(self) -> dict[int, int]:
        """How many requests to `/embed` ended with each status."""
        found = [
            (labels, value)
            for name, labels, value in self.samples
            if name == "requests_total" and 'route="/embed"' in labels and value
        ]
        return {int(re.findall(r'status="(\d+)"', labels)[0]): int(value) for labels, value in found}

    def check_at_rest(self) -> None:
        """Nothing waits, and every image that was encoded was either a hit or a miss."""
        assert {name: self.total(name) for name in GAUGES_AT_REST} == dict.fromkeys(GAUGES_AT_REST, 0)
        run = self.total("encoder_cudagraph_hits_total") + self.total("encoder_cudagraph_misses_total")
        assert self.total("images_total") == self.total("batch_images_sum") == run

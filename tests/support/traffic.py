"""Callers on their own sockets, which wait for their answer or leave early; and samples of the metrics."""

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

GAUGES_AT_REST = ("queue_images", "queue_tokens", "inflight_bytes")  # 0 without requests


class NoAnswer(Exception):
    """The server closed the connection without an answer."""


@dataclass(frozen=True)
class Answer:
    """The answer that one caller got."""

    status: int
    headers: httpx.Headers
    body: Any

    @property
    def code(self) -> str | None:
        """The code of the error, if the answer is one."""
        return None if self.status == 200 else self.body["error"]["code"]

    @property
    def embeddings(self) -> list[list[float]]:
        return [entry["embedding"] for entry in self.body["data"]]


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A PNG file of an array [height, width, 3]."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def post(*images: bytes, query: str = "") -> bytes:
    """The bytes of a request with one image as its body, or with several in a form."""
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
    """Sends a request and reads until the server closes. Fails unless that is one complete answer."""
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
    """Sends the headers of a request, and of its body up to `num_bytes` in all. Leaves after `wait_s`."""
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
    """The samples of one scrape of `/metrics`, without our prefix."""

    def __init__(self, text: str) -> None:
        lines = re.findall(r"^(?:vision_sidecar_)?(\w+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE)
        self.samples = [(name, labels, float(value)) for name, labels, value in lines]

    def total(self, name: str, labels: str = "") -> float:
        """The sum over the series of a metric whose labels contain `labels`."""
        values = [value for found, given, value in self.samples if found == name and labels in given]
        assert values, f"no sample {name} {labels}"
        return sum(values)

    def statuses(self) -> dict[int, int]:
        """The number of requests to `/embed` by status."""
        found = [
            (labels, value)
            for name, labels, value in self.samples
            if name == "requests_total" and 'route="/embed"' in labels and value
        ]
        return {int(re.findall(r'status="(\d+)"', labels)[0]): int(value) for labels, value in found}

    def check_at_rest(self) -> None:
        """Checks that nothing waits, and that every encoded image was a hit or a miss."""
        assert {name: self.total(name) for name in GAUGES_AT_REST} == dict.fromkeys(GAUGES_AT_REST, 0)
        run = self.total("encoder_cudagraph_hits_total") + self.total("encoder_cudagraph_misses_total")
        assert self.total("images_total") == self.total("batch_images_sum") == run

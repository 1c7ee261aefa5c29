"""Images that `bench serve` makes different by a stamp, and tokens that it reads from the server's store."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from service.bench.photos import with_stamp
from service.bench.token_reader import TokenReader
from service.images.image_file import ImageLimits, read_header
from tests.support.app import encode_image
from tests.support.bench_load import measure
from tests.support.fake_server import FakeServer
from tests.support.process import Process


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_stamp_does_not_change_the_picture(format_: str) -> None:
    image = encode_image(40, 56, format=format_)
    limits = ImageLimits(2**20, 2**20)
    plain, stamped = (read_header(data, limits).decode() for data in (image, with_stamp(image)))
    assert np.array_equal(plain, stamped)


@pytest.mark.parametrize("flags", [["--processes", "2"], ["--images-per-request", "3"]])
@pytest.mark.parametrize("chat", [[], ["--chat", "m"]])
def test_no_two_images_that_are_sent_are_equal(tmp_path: Path, flags: list[str], chat: list[str]) -> None:
    with FakeServer() as server:
        for _ in range(2):
            measure(server, "--duration", "0.3", *flags, *chat, tmp_path=tmp_path)
        bodies = [body for _, body in server.seen.posts]
    if chat:
        bodies = [b"".join(images_of(body)) for body in bodies]
    stamps = [stamp for body in bodies for stamp in re.findall(rb"(?s)free(.{24,26})", body)]
    images_per_request = 3 if "3" in flags else 1
    assert len(stamps) == images_per_request * len(bodies) > 20
    assert len(set(stamps)) == len(stamps)


def images_of(chat: bytes) -> list[bytes]:
    [message] = json.loads(chat)["messages"]
    *images, text = message["content"]
    assert text["type"] == "text"
    return [base64.b64decode(part["image_url"]["url"].partition(",")[2], validate=True) for part in images]


def test_chat_asks_for_one_token_about_the_images(tmp_path: Path) -> None:
    with FakeServer() as server:
        measure(server, "--duration", "1", "--chat", "m", "--images-per-request", "2", tmp_path=tmp_path)
        measure(server, "--duration", "1", "--chat", "m", "--repeat-images", tmp_path=tmp_path)
        head, body = server.seen.posts[0]
        _, last = server.seen.posts[-1]
    assert head.startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    assert (json.loads(body)["model"], json.loads(body)["max_tokens"]) == ("m", 1)
    assert len(images_of(body)) == 2
    for image in images_of(body) + images_of(last):
        assert read_header(image, ImageLimits(2**20, 2**20)).decode().shape == (32, 64, 3)


def test_server_with_a_cache_encodes_every_image_unless_they_repeat(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    flags = ("--port", "0", "--device", "cpu", "--handoff-dir", str(folder))
    process = Process(*flags).ready()
    load = ["--duration", "2", "--query", "format=handoff", "--read-tokens", str(folder)]
    try:
        new, repeated = (
            measure(process, *load, *more, tmp_path=tmp_path)  # type: ignore[arg-type]
            for more in ([], ["--repeat-images"])
        )
    finally:
        process.kill()
    for report in (new, repeated):
        assert report["load"]["statuses"].keys() == {"200"}
        assert report["load"]["tokens_missing"] == 0
        assert report["load"]["tokens_gb_per_s"] > 0
    assert repeated["load"]["images_per_s"] > new["load"]["images_per_s"]


def test_missing_tokens_are_counted(tmp_path: Path) -> None:
    present = hashlib.sha256(b"0").hexdigest()
    (tmp_path / f"{present}.safetensors").write_bytes(b"x" * 1000)
    body = json.dumps({"data": [{"uuid": present}, {"uuid": "gone"}]}).encode()
    assert asyncio.run(TokenReader(str(tmp_path)).read(body)) == (1000, 1)

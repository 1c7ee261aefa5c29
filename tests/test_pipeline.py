"""The steps of one request, their order and their threads."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from fastapi import Request

from models import EncodeItem, Patches
from service.answers.answer import Answer
from service.config.settings import Settings
from service.fetching.fetcher import Fetcher
from service.fetching.image_urls import ImageUrl
from tests.support.app import FakeEncoder, FakeRunning, encode_image, known_embedding
from tests.support.exchange import Exchange, RecordingPreprocessor, Source, json_exchange


def test_one_image_from_bytes_to_answer(settings: Settings) -> None:
    source = Source()
    image = encode_image(height=64, width=96)
    exchange = Exchange(image, query="normalize=false")
    body = exchange.run(source, settings)
    [[item]] = source.submitted
    [entry] = body["data"]
    assert entry["embedding"] == pytest.approx(known_embedding(item.patches, item.output).tolist())
    assert (entry["width"], entry["height"]) == (96, 64)
    assert (entry["grid_thw"], entry["num_tokens"]) == ([1, 4, 6], 6)
    assert entry["sha256"] == hashlib.sha256(image).hexdigest()
    assert (body["model"], body["fingerprint"], body["revision"]) == ("demo", "f" * 64, "abc123")
    assert set(exchange.context.stages_s) == {"read", "decode", "queue", "encode", "serialize"}
    assert min(exchange.context.stages_s.values()) >= 0


def test_several_images_are_one_batch_in_order(settings: Settings) -> None:
    source = Source()
    images = [encode_image(32 * n, 32, seed=n) for n in (3, 1, 2)]
    body = json_exchange(*images).run(source, settings)
    assert [entry["index"] for entry in body["data"]] == [0, 1, 2]
    assert [entry["sha256"] for entry in body["data"]] == [hashlib.sha256(i).hexdigest() for i in images]
    assert [entry["num_tokens"] for entry in body["data"]] == [3, 1, 2]
    assert body["usage"] == {"num_images": 3, "num_tokens": 6}
    assert [item.patches.num_tokens for item in source.submitted[0]] == [3, 1, 2]
    assert len(source.submitted) == 1


def test_large_answer_has_the_same_content_as_a_small_one(settings: Settings) -> None:
    source = Source()
    images = [encode_image(1024, 1024, seed=n) for n in range(3)]
    body = json_exchange(*images, pooling="none", deepstack=True).run(source, settings)
    numbers = [np.array(entry["embedding"], np.float32) for entry in body["data"]]
    assert sum(array.size for array in numbers) > 32_768
    for array, item in zip(numbers, source.submitted[0], strict=True):
        assert np.array_equal(array, known_embedding(item.patches, item.output).numpy())


def test_urls_are_refused_if_no_domain_is_allowed(settings: Settings) -> None:
    body = {"images": [base64.b64encode(encode_image()).decode(), "http://127.0.0.1/"]}
    exchange = Exchange(json.dumps(body).encode(), "application/json")
    error = exchange.refusal(settings)
    assert (error.status, error.code, error.param) == (400, "url_not_allowed", "images[1]")
    assert "not enabled" in error.message
    assert "fetch" not in exchange.context.stages_s


class RecordingFetcher(Fetcher):
    """Answers every URL with an image, and records its calls."""

    def __init__(self) -> None:
        self.asked_for: list[Sequence[bytes | ImageUrl]] = []

    async def fetch(
        self, images: Sequence[bytes | ImageUrl], hold: Callable[[int], None] = lambda num_bytes: None
    ) -> list[bytes]:
        self.asked_for.append(images)
        return [image if isinstance(image, bytes) else encode_image() for image in images]


def test_only_requests_with_urls_reach_the_fetcher(settings: Settings) -> None:
    source = Source()
    source.fetcher = fetcher = RecordingFetcher()
    image = encode_image()
    for exchange in (Exchange(image), json_exchange(image, image)):
        exchange.run(source, settings)
        assert (fetcher.asked_for, "fetch" in exchange.context.stages_s) == ([], False)
    body = {"images": [base64.b64encode(image).decode(), "http://example.org/"]}
    exchange = Exchange(json.dumps(body).encode(), "application/json")
    assert exchange.run(source, settings)["usage"]["num_images"] == 2
    assert fetcher.asked_for == [(image, ImageUrl("http://example.org/"))]
    assert exchange.context.stages_s["fetch"] >= 0


@pytest.mark.parametrize(
    ("num_images", "side", "format", "checked_in"),
    [
        (1, 64, "PNG", "MainThread"),
        (1, 256, "PNG", "decode"),
        (1, 64, "BMP", "decode"),
        (3, 64, "PNG", "decode"),
    ],
)
def test_images_are_decoded_off_the_event_loop(
    num_images: int, side: int, format: str, checked_in: str, settings: Settings
) -> None:
    """Only the header of a single small file is read faster than a hop to a thread takes."""
    preprocessor = RecordingPreprocessor()
    images = [encode_image(side, side, format=format)] * num_images
    json_exchange(*images).run(Source(preprocessor), settings)
    assert [name.split("_")[0] for name in preprocessor.threads] == ["decode"] * num_images
    assert {name.split("_")[0] for name in preprocessor.checked_in} == {checked_in}


class Watched(torch.Tensor):
    """A tensor that records the threads in which it is serialized."""

    threads: list[str]

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        self.threads.append(threading.current_thread().name)
        return self.as_subclass(torch.Tensor)


class WatchedSource(Source):
    """Answers a watched embedding of `size` numbers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        embedding = torch.zeros(size).as_subclass(Watched)
        embedding.threads = []
        self.embedding = embedding
        fake = cast(FakeEncoder, self.encoder)
        launch = fake.launch

        def launch_watched(items: Sequence[EncodeItem]) -> FakeRunning:
            result = replace(launch(items).wait(), embeddings=(embedding,))
            return FakeRunning(lambda: result)

        fake.launch = launch_watched  # type: ignore[method-assign]


@pytest.mark.parametrize(("size", "thread"), [(32_768, "MainThread"), (32_769, "decode")])
def test_large_answers_are_serialized_off_the_event_loop(size: int, thread: str, settings: Settings) -> None:
    source = WatchedSource(size)
    Exchange(encode_image()).run(source, settings)
    assert [name.split("_")[0] for name in source.embedding.threads] == [thread]


class Ticking(RecordingPreprocessor):
    """Waits in every step until the event loop has run something else."""

    def __init__(self) -> None:
        super().__init__()
        self.tick = threading.Event()

    def wait(self) -> None:
        self.tick.clear()
        assert self.tick.wait(10), "the event loop stands still"

    def num_tokens(self, height: int, width: int) -> int:
        self.wait()
        return super().num_tokens(height, width)

    def __call__(self, rgb: npt.NDArray[np.uint8], *, pin_memory: bool = False) -> Patches:
        self.wait()
        return super().__call__(rgb)


def test_the_event_loop_goes_on_while_images_are_prepared(settings: Settings) -> None:
    preprocessor = Ticking()
    source = Source(preprocessor)

    async def heartbeat() -> None:
        while True:
            preprocessor.tick.set()
            await asyncio.sleep(0.001)

    async def main() -> Answer:
        beating = asyncio.create_task(heartbeat())
        try:
            with ThreadPoolExecutor(1) as executor, source.serving() as batcher:
                exchange = json_exchange(*[encode_image()] * 3)
                request = Request(exchange.scope, exchange.receive)
                pipeline = source.pipeline(settings, batcher, executor)
                return await pipeline.embed(request)
        finally:
            beating.cancel()

    [body] = asyncio.run(main()).body
    assert len(json.loads(bytes(body))["data"]) == 3

"""One request as the pipeline sees it, and the surroundings of a pipeline."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from fastapi import Request
from prometheus_client import CollectorRegistry
from starlette.types import Message

from models import EncodeItem, Patches, Preprocessor, Replica, VisionEncoder
from service.answers.answer import Answer
from service.config.settings import Settings
from service.embedder import Embedder
from service.errors import ApiError
from service.fetching.fetcher import Fetcher, make_fetcher
from service.http.context import RequestContext
from service.images.decoding_memory import DecodingMemory
from service.images.image_file import ImageLimits
from service.images.preparation import PreparationResources
from service.intake.byte_budget import ByteBudget
from service.metrics import Metrics
from service.pipeline import Pipeline
from service.queue.batcher import Batcher
from service.queue.queue_records import QueueLimits
from tests.support.app import CONFIG, FakeEncoder


class RecordingPreprocessor(Preprocessor):
    """Records the threads in which images were checked and decoded."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.threads: list[str] = []
        self.checked_in: list[str] = []

    def num_tokens(self, height: int, width: int) -> int:
        self.checked_in.append(threading.current_thread().name)
        return super().num_tokens(height, width)

    def __call__(self, rgb: npt.NDArray[np.uint8], *, pin_memory: bool = False) -> Patches:
        self.threads.append(threading.current_thread().name)
        return super().__call__(rgb)


class Source:
    """The surroundings of a pipeline: a queue, and a device that encodes at once."""

    def __init__(
        self,
        preprocessor: Preprocessor | None = None,
        fail: Callable[[Sequence[EncodeItem]], None] = lambda items: None,
    ) -> None:
        fake = FakeEncoder(fail)
        fake.preprocessor = preprocessor or fake.preprocessor
        self.encoder = cast(VisionEncoder, fake)
        self.submitted = fake.batches
        self.limits = QueueLimits(max_batch_tokens=100_000, max_queue_tokens=100_000)
        self.budget = ByteBudget(2**29)
        self.memory = DecodingMemory(2**29)
        self.fetcher: Fetcher | None = None  # None: the one that the settings ask for

    @contextmanager
    def serving(self) -> Iterator[Batcher]:
        batcher = Batcher(self.limits, observe=lambda stats: None, on_lost=lambda error: None)
        held_bytes = self.budget.held_bytes
        replica = Replica("fake", lambda: self.encoder)
        replica.serve(batcher.add_device("fake"))
        try:
            yield batcher
        finally:
            batcher.close()
            replica.close()
            # However the request ended, nothing is held any more.
            assert (batcher.waiting_images, batcher.waiting_tokens, batcher.reserved_tokens) == (0, 0, 0)
            assert self.budget.held_bytes == held_bytes

    def pipeline(
        self, settings: Settings, batcher: Batcher, decoders: Executor, writers: Executor | None = None
    ) -> Pipeline:
        """A pipeline that serializes on `decoders`, too, unless it has `writers`."""
        limits = ImageLimits(settings.max_image_bytes, settings.max_image_pixels)
        resources = PreparationResources(batcher, decoders, limits, settings.max_request_tokens, self.memory)
        fetcher = self.fetcher or make_fetcher(settings)
        metrics = Metrics(CollectorRegistry(), ("/embed",))
        writers = writers or decoders
        embedder = Embedder(settings, self, resources, writers, None, metrics)
        return Pipeline(settings, self, self.budget, writers, fetcher, embedder, None)


class Exchange:
    """One request as the pipeline sees it, and its outcome."""

    def __init__(
        self,
        body: bytes,
        content_type: str = "image/png",
        *,
        query: str = "",
        headers: Sequence[tuple[str, str]] = (),
        then: Sequence[Message] = (),
    ) -> None:
        self.unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}, *then]
        self.context = RequestContext("test", "POST")
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "query_string": query.encode(),
            "headers": [
                (name.encode(), value.encode()) for name, value in (("content-type", content_type), *headers)
            ],
        }
        self.context.attach(self.scope)
        self.over = threading.Event()  # once it is answered or refused

    async def receive(self) -> Message:
        if not self.unread:
            await asyncio.Event().wait()  # the caller waits for the answer
        return self.unread.pop(0)

    def run(
        self, source: Source, settings: Settings, executor: ThreadPoolExecutor | None = None
    ) -> dict[str, Any]:
        """Answers the request. Decodes on `executor`, by default on threads that end with the request."""

        async def embed() -> Answer:
            try:
                return await pipeline.embed(Request(self.scope, self.receive))
            finally:
                await asyncio.sleep(0)
                assert asyncio.all_tasks() == {asyncio.current_task()}, "the request left a task behind"
                self.over.set()

        with ThreadPoolExecutor(2, thread_name_prefix="decode") as own, source.serving() as batcher:
            pipeline = source.pipeline(settings, batcher, executor or own, own)
            answer: dict[str, Any] = json.loads(b"".join(asyncio.run(embed()).body))
            return answer

    def refusal(self, settings: Settings, source: Source | None = None) -> ApiError:
        with pytest.raises(ApiError) as caught:
            self.run(source or Source(), settings)
        return caught.value


def json_exchange(*images: bytes, **members: str | bool) -> Exchange:
    body = {"images": [base64.b64encode(image).decode() for image in images], **members}
    return Exchange(json.dumps(body).encode(), "application/json")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)

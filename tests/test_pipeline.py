from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Message

from models import EncodeItem, Patches, Preprocessor, Replica, VisionEncoder
from service.answers.answer import Answer
from service.config.settings import Settings
from service.errors import ApiError
from service.fetching.fetcher import Fetcher, make_fetcher
from service.fetching.image_urls import ImageUrl
from service.http.context import RequestContext
from service.images.decoding_memory import DecodingMemory
from service.images.image_file import ImageLimits
from service.images.preparation import Preparation
from service.intake.byte_budget import ByteBudget
from service.pipeline import Pipeline
from service.queue.batcher import Batcher
from service.queue.queue_records import QueueLimits
from tests.support.app import CONFIG, FakeEncoder, FakeRunning, encode_image, known_embedding, only

LEFT: Message = {"type": "http.disconnect"}


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
        return Pipeline(
            settings,
            self,
            batcher,
            self.budget,
            decoders,
            writers or decoders,
            self.fetcher or make_fetcher(settings),
            ImageLimits(settings.max_image_bytes, settings.max_image_pixels),
            self.memory,
        )


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


def test_query_parameter_wins_over_the_body(settings: Settings) -> None:
    exchange = json_exchange(encode_image(), pooling="none", normalize=False)
    exchange.scope["query_string"] = b"pooling=mean"
    source = Source()
    exchange.run(source, settings)
    output = source.submitted[0][0].output
    assert (output.pooled, output.normalize) == (True, False)


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ("poling=none", "invalid_option", "poling"),
        ("pooling=max", "invalid_option", "pooling"),
        ("normalize=maybe", "invalid_option", "normalize"),
        ("normalize=1&pooling=none", "option_conflict", "normalize"),
        ("deepstack=1&pooling=mean", "option_conflict", "deepstack"),
        ("dtype=float16&encoding_format=float", "option_conflict", "dtype"),
    ],
)
def test_a_bad_query_is_refused_before_the_body_is_read(
    query: str, code: str, param: str, settings: Settings
) -> None:
    body = {"images": base64.b64encode(encode_image()).decode(), "pooling": "none", "format": "json"}
    exchange = Exchange(json.dumps(body).encode(), "application/json", query=query)
    error = exchange.refusal(settings)
    assert (error.code, error.param) == (code, param)
    assert len(exchange.unread) == 1


@pytest.mark.parametrize(
    ("query", "accept", "code"),
    [("deepstack=1", "*/*", "option_conflict"), ("", "text/html", "not_acceptable")],
)
def test_raw_body_is_not_read_if_its_options_are_refused(
    query: str, accept: str, code: str, settings: Settings
) -> None:
    exchange = Exchange(encode_image(), query=query, headers=[("accept", accept)])
    assert exchange.refusal(settings).code == code
    assert len(exchange.unread) == 1


def test_options_in_the_body_may_resolve_a_conflict(settings: Settings) -> None:
    body = {"images": base64.b64encode(encode_image()).decode(), "pooling": "none", "format": "json"}
    content = json.dumps(body).encode()
    accept = [("accept", "text/html")]
    Exchange(content, "application/json", query="deepstack=1", headers=accept).run(Source(), settings)


def test_all_headers_are_checked_before_any_pixels_are_decoded(settings: Settings) -> None:
    truncated = encode_image(64, 64)[:-200]
    preprocessor = RecordingPreprocessor()
    error = json_exchange(truncated, encode_image(), b"no image").refusal(settings, Source(preprocessor))
    assert (error.status, error.code, error.param) == (400, "invalid_image", "images[2]")
    assert preprocessor.threads == []


@pytest.mark.parametrize("num_good", [0, 1, 4])
def test_the_first_broken_image_is_named(num_good: int, settings: Settings) -> None:
    truncated = encode_image(64, 64)[:-200]
    source = Source()
    error = json_exchange(*[encode_image()] * num_good, truncated, truncated).refusal(settings, source)
    assert (error.status, error.code, error.param) == (400, "invalid_image", f"images[{num_good}]")
    assert source.submitted == []


def test_tokens_of_a_request_have_a_limit(settings: Settings) -> None:
    small = only(settings, max_request_tokens=7)
    four, three = encode_image(64, 64), encode_image(32, 96)
    json_exchange(four, three).run(Source(), small)
    error = json_exchange(four, four, three).refusal(small)
    assert (error.status, error.code, error.param) == (413, "too_many_tokens", "images[1]")
    assert "8 tokens" in error.message
    assert "7" in error.message
    assert Exchange(encode_image(64, 128)).refusal(small).param == "images[0]"


def test_limits_of_one_image_name_it(settings: Settings) -> None:
    error = json_exchange(encode_image(), encode_image(100, 100)).refusal(
        only(settings, max_image_pixels=9999)
    )
    assert (error.status, error.code, error.param) == (413, "too_many_pixels", "images[1]")


def test_extreme_aspect_ratio_is_refused(settings: Settings) -> None:
    error = json_exchange(encode_image(), encode_image(2, 402)).refusal(settings)
    assert (error.status, error.code, error.param) == (400, "invalid_aspect_ratio", "images[1]")
    assert "402 x 2" in error.message


def test_too_many_json_floats_are_refused_before_pixels_are_decoded(settings: Settings) -> None:
    preprocessor = RecordingPreprocessor()
    source = Source(preprocessor)
    source.encoder.hidden_size = 4_194_304
    error = Exchange(encode_image(32, 64), query="pooling=none").refusal(settings, source)
    assert (error.status, error.code) == (400, "response_too_large")
    assert preprocessor.threads == []
    json_exchange(encode_image(32, 64), pooling="none", encoding_format="base64").run(source, settings)


def test_a_compressed_body_is_refused(settings: Settings) -> None:
    error = Exchange(encode_image(), headers=[("content-encoding", "gzip")]).refusal(settings)
    assert (error.status, error.code) == (415, "unsupported_content_type")
    for name in ("identity", "Identity"):
        Exchange(encode_image(), headers=[("content-encoding", name)]).run(Source(), settings)


def test_accept_may_come_in_several_lines(settings: Settings) -> None:
    lines = [("accept", "text/html"), ("accept", "application/json;q=0.5")]
    Exchange(encode_image(), headers=lines).run(Source(), settings)
    assert Exchange(encode_image(), headers=lines[:1]).refusal(settings).status == 406


@contextmanager
def busy_executor(gate: threading.Event) -> Iterator[ThreadPoolExecutor]:
    """An executor that decodes nothing before the gate is set or the block ends."""
    with ThreadPoolExecutor(1, thread_name_prefix="decode") as executor:
        executor.submit(gate.wait)
        try:
            yield executor
        finally:
            gate.set()


def test_images_of_a_caller_that_left_are_not_decoded(settings: Settings, gate: threading.Event) -> None:
    preprocessor = RecordingPreprocessor()
    source = Source(preprocessor)
    exchange = Exchange(encode_image(), then=[LEFT])
    with busy_executor(gate) as executor, pytest.raises(ClientDisconnect):
        exchange.run(source, settings, executor)
    assert (preprocessor.threads, source.submitted) == ([], [])
    assert set(exchange.context.stages_s) == {"read"}


def test_images_of_a_caller_that_left_are_not_queued(settings: Settings) -> None:
    class Leaving(RecordingPreprocessor):
        """The caller leaves while the image is decoded."""

        def __call__(self, rgb: npt.NDArray[np.uint8], *, pin_memory: bool = False) -> Patches:
            exchange.leave()
            assert exchange.over.wait(10)
            return super().__call__(rgb)

    exchange = LeavingExchange(encode_image())
    source = Source(Leaving())
    with pytest.raises(ClientDisconnect):
        exchange.run(source, settings)
    assert source.submitted == []
    assert set(exchange.context.stages_s) == {"read"}


def test_caller_that_leaves_during_the_body_ends_the_request(settings: Settings) -> None:
    exchange = Exchange(b"", then=[])
    exchange.unread[:] = [{"type": "http.request", "body": b"half", "more_body": True}, LEFT]
    with pytest.raises(ClientDisconnect):
        exchange.run(Source(), settings)


class LeavingExchange(Exchange):
    """A request whose caller leaves when the test calls `leave`, from any thread."""

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self._left = threading.Event()

    def leave(self) -> None:
        self._left.set()

    async def receive(self) -> Message:
        if self.unread:
            return self.unread.pop(0)
        while not self._left.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.001)
        return LEFT


def test_answer_to_a_caller_that_left_is_not_serialized(settings: Settings) -> None:
    def leave(items: Sequence[EncodeItem]) -> None:
        """Leaves while the device works."""
        exchange.leave()
        assert exchange.over.wait(10)

    exchange = LeavingExchange(encode_image())
    with pytest.raises(ClientDisconnect):
        exchange.run(Source(fail=leave), settings)
    assert set(exchange.context.stages_s) == {"read", "decode", "queue"}


def test_deadline_ends_a_request_that_waits_for_a_decode_thread(
    settings: Settings, gate: threading.Event
) -> None:
    exchange = Exchange(encode_image())
    with busy_executor(gate) as executor, pytest.raises(ApiError) as caught:
        exchange.run(Source(), only(settings, request_timeout_s=0.05), executor)
    assert (caught.value.status, caught.value.code) == (504, "deadline_exceeded")


def test_deadline_ends_a_request_that_waits_for_the_device(settings: Settings) -> None:
    def hold(items: Sequence[EncodeItem]) -> None:
        assert exchange.over.wait(10)

    exchange = Exchange(encode_image())
    source = Source(fail=hold)
    error = exchange.refusal(only(settings, request_timeout_s=0.05), source)
    assert (error.status, error.code) == (504, "deadline_exceeded")
    assert len(source.submitted) == 1


class OutOfTime(Preprocessor):
    """Raises an error that looks like a deadline."""

    def num_tokens(self, height: int, width: int) -> int:
        raise TimeoutError("of something else")


def test_timeout_errors_of_other_code_are_not_deadlines(settings: Settings) -> None:
    with pytest.raises(TimeoutError, match="of something else"):
        Exchange(encode_image()).run(Source(OutOfTime(CONFIG)), settings)


def test_body_that_is_incomplete_at_the_deadline_is_408(settings: Settings) -> None:
    exchange = Exchange(b"")
    exchange.unread[:] = [{"type": "http.request", "body": b"half", "more_body": True}]
    error = exchange.refusal(only(settings, request_timeout_s=0.05))
    assert (error.status, error.code) == (408, "body_timeout")


def test_full_queue_refuses_a_request_that_does_not_fit(settings: Settings, gate: threading.Event) -> None:
    def hold(items: Sequence[EncodeItem]) -> None:
        gate.wait()

    source = Source(fail=hold)
    source.limits = QueueLimits(max_batch_tokens=6, max_queue_tokens=7)

    async def main() -> list[Any]:
        with ThreadPoolExecutor(2) as executor, source.serving() as batcher:
            pipeline = source.pipeline(settings, batcher, executor)

            def start() -> asyncio.Task[Answer]:
                exchanges.append(Exchange(encode_image()))  # 6 tokens
                request = Request(exchanges[-1].scope, exchanges[-1].receive)
                return asyncio.create_task(pipeline.embed(request))

            started: list[asyncio.Task[Answer]] = []
            try:
                for num_on_device in (1, 2):
                    started += [start()]
                    await until(lambda: len(source.submitted) == num_on_device)  # noqa: B023
                started += [start()]
                await until(lambda: batcher.waiting_tokens == 6)
                started += [start()]  # its tokens do not fit
                await until(lambda: started[3].done())
            finally:
                gate.set()
            return await asyncio.gather(*started, return_exceptions=True)

    exchanges: list[Exchange] = []
    answers = asyncio.run(main())
    assert [isinstance(answer, Answer) for answer in answers] == [True, True, True, False]
    assert {(error.status, error.code) for error in answers[3:]} == {(429, "queue_full")}
    assert all(error.headers()["Retry-After"] == "1" for error in answers[3:])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("says_its_length", [True, False])
def test_bytes_in_memory_have_a_limit(says_its_length: bool, settings: Settings) -> None:
    image = encode_image()
    headers = [("content-length", str(len(image)))] if says_its_length else []
    source = Source()
    source.budget = ByteBudget(len(image))
    with source.budget.permit(1) as other:
        other.add(1)
        exchange = Exchange(image, headers=headers)
        with pytest.raises(ApiError) as caught:
            exchange.run(source, settings)
        assert (caught.value.status, caught.value.code) == (429, "too_many_bytes")
        assert caught.value.headers() == {"Retry-After": "1"}
        assert len(exchange.unread) == says_its_length
        assert source.budget.held_bytes == 1
    Exchange(image, headers=headers).run(source, settings)
    assert source.submitted != []


@pytest.mark.parametrize("length", ["x", "-1", "9" * 30, "99999999999"])
def test_refused_content_length_takes_no_room(length: str, settings: Settings) -> None:
    error = Exchange(encode_image(), headers=[("content-length", length)]).refusal(settings)
    assert error.status in (400, 413)


def test_more_tokens_than_the_whole_queue_are_too_large(settings: Settings) -> None:
    preprocessor = RecordingPreprocessor()
    source = Source(preprocessor)
    source.limits = QueueLimits(max_batch_tokens=6, max_queue_tokens=11)
    error = json_exchange(encode_image(), encode_image()).refusal(settings, source)
    assert (error.status, error.code) == (413, "too_many_tokens")
    assert preprocessor.threads == []
    Exchange(encode_image()).run(source, settings)


def test_bodies_are_parsed_while_all_decode_threads_are_busy(
    settings: Settings, gate: threading.Event
) -> None:
    source = Source()
    exchange = Exchange(b'{"images": [' + b" " * 2**17, "application/json")

    async def main() -> None:
        with (
            ThreadPoolExecutor(1) as decoders,
            ThreadPoolExecutor(1) as writers,
            source.serving() as batcher,
        ):
            decoders.submit(gate.wait)
            pipeline = source.pipeline(settings, batcher, decoders, writers)
            try:
                await pipeline.embed(Request(exchange.scope, exchange.receive))
            finally:
                gate.set()

    with pytest.raises(ApiError) as caught:
        asyncio.run(asyncio.wait_for(main(), 10))
    assert caught.value.code == "invalid_json"


def test_request_past_its_deadline_releases_its_files(settings: Settings, gate: threading.Event) -> None:
    """A decode thread that has not started on the request refers to it, but not to its images."""
    source = Source()
    held: list[Preparation] = []

    async def main() -> None:
        with ThreadPoolExecutor(1) as executor, source.serving() as batcher:
            executor.submit(gate.wait)
            limited = only(settings, request_timeout_s=0.05)
            pipeline = source.pipeline(limited, batcher, executor)
            exchange = Exchange(encode_image(400, 400))
            try:
                with pytest.raises(ApiError):
                    await pipeline.embed(Request(exchange.scope, exchange.receive))
                held.extend(thing for thing in gc.get_objects() if type(thing) is Preparation)
            finally:
                gate.set()

    asyncio.run(main())
    assert held
    assert not any(preparation._images for preparation in held)

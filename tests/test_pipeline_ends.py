"""Requests that end early: callers that leave, deadlines, full queues."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Message

from models import EncodeItem, Patches, Preprocessor
from service.answers.answer import Answer
from service.config.settings import Settings
from service.errors import ApiError
from service.images.preparation import Preparation
from service.intake.byte_budget import ByteBudget
from service.queue.queue_records import QueueLimits
from tests.support.app import CONFIG, encode_image, only
from tests.support.exchange import Exchange, RecordingPreprocessor, Source, json_exchange, until

LEFT: Message = {"type": "http.disconnect"}


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

"""The work of the decode threads, with an executor that runs each piece of work when the test says so."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from models import EncodeItem, Patches, Preprocessor, VisionEncoder
from service.errors import ApiError
from service.images.decoding_memory import DecodingMemory
from service.images.image_file import ImageLimits
from service.images.preparation import HashedImage, Preparation, PreparationResources
from service.intake.options import resolve_options
from service.queue.batcher import Batcher
from service.queue.queue_records import QueueLimits
from service.queue.ticket import Ticket
from tests.support.app import CONFIG, FakeEncoder, encode_image
from tests.support.queueing import Callers
from tests.support.waiting import eventually

TRUNCATED = encode_image(64, 64)[:-200]


class ByHand(Executor):
    """Keeps the work until `run` is called."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.work.append(lambda: function(*args))
        return Future()

    def run(self, index: int = 0) -> None:
        self.work.pop(index)()


class Counting(Preprocessor):
    """Counts the decoded images, and calls `meanwhile` for each of them."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.num_decoded = 0
        self.meanwhile: Callable[[], None] = lambda: None

    def __call__(self, rgb: npt.NDArray[np.uint8], *, pin_memory: bool = False) -> Patches:
        self.num_decoded += 1
        self.meanwhile()
        return super().__call__(rgb)


class Bench:
    """Prepares requests for a queue from which no device takes."""

    def __init__(self, callers: Callers, max_queue_tokens: int = 1000, max_tokens: int = 1000) -> None:
        self.callers = callers
        self.executor = ByHand()
        self.preprocessor = Counting()
        encoder = FakeEncoder()
        encoder.preprocessor = self.preprocessor
        self._encoder = cast(VisionEncoder, encoder)
        limits = QueueLimits(max_batch_tokens=100, max_queue_tokens=max_queue_tokens)
        self.batcher = Batcher(limits, observe=lambda stats: None, on_lost=lambda error: None)
        self.batcher.add_device("a")
        self.memory = DecodingMemory(2**24)
        limits_of_images = ImageLimits(2**20, 2**20)
        self._resources = PreparationResources(
            self.batcher, self.executor, limits_of_images, max_tokens, self.memory
        )

    def start(self, *images: bytes) -> tuple[Ticket, Preparation]:
        ticket = self.callers.ticket()
        hashed = [HashedImage(image, hashlib.sha256(image).hexdigest()) for image in images]
        preparation = Preparation(self._resources, hashed, resolve_options({}, None), ticket, self._encoder)
        preparation.start()
        return ticket, preparation

    def refusal(self, ticket: Ticket) -> tuple[int, str, str | None]:
        error = self.callers.error(ticket)
        assert isinstance(error, ApiError)
        assert self.batcher.reserved_tokens == 0
        return error.status, error.code, error.param


@pytest.fixture
def bench(callers: Callers) -> Bench:
    return Bench(callers)


def test_single_image_is_queued_by_one_piece_of_work(bench: Bench) -> None:
    ticket, preparation = bench.start(encode_image(64, 96))
    assert (len(bench.executor.work), bench.batcher.waiting_images) == (1, 0)
    bench.executor.run()
    assert bench.executor.work == []
    assert (bench.batcher.waiting_images, bench.batcher.waiting_tokens) == (1, 6)
    [facts] = preparation.facts
    assert (facts.num_tokens, facts.grid_thw, facts.width, facts.height) == (6, (1, 4, 6), 96, 64)
    assert not ticket.ended


def test_images_are_queued_together_and_in_order_whatever_the_order_of_decoding(bench: Bench) -> None:
    _, preparation = bench.start(*[encode_image(32 * n, 32) for n in (1, 2, 3, 4)])
    bench.executor.run()
    assert bench.preprocessor.num_decoded == 1
    for index in (2, 0, 0):
        assert bench.batcher.waiting_images == 0
        assert bench.batcher.reserved_tokens == 10  # reserved before anything was decoded
        bench.executor.run(index)
    assert [facts.num_tokens for facts in preparation.facts] == [1, 2, 3, 4]
    taken = bench.batcher.take("a")
    assert taken is not None
    assert [image.patches.num_tokens for image in taken[0]] == [1, 2, 3, 4]


@pytest.mark.parametrize("order", [(0, 0, 0), (2, 1, 0), (1, 0, 0), (2, 0, 0)])
@pytest.mark.parametrize(
    ("broken", "named"), [((0, 2), 0), ((1, 3), 1), ((1, 2, 3), 1), ((2, 3), 2), ((3,), 3)]
)
def test_first_broken_image_is_named_whatever_the_order_of_decoding(
    order: Sequence[int], broken: Sequence[int], named: int, bench: Bench
) -> None:
    ticket, _ = bench.start(*[TRUNCATED if index in broken else encode_image() for index in range(4)])
    bench.executor.run()
    for index in order:
        assert not ticket.ended
        bench.executor.run(index)
    assert bench.refusal(ticket) == (400, "invalid_image", f"images[{named}]")
    assert bench.batcher.waiting_images == 0


def test_first_broken_image_is_named_if_a_later_image_fails_last(bench: Bench) -> None:
    class Overtaken(Counting):
        def __call__(self, rgb: npt.NDArray[np.uint8], *, pin_memory: bool = False) -> Patches:
            if rgb.shape[0] == 32:  # the last image; the broken ones are decoded while it is
                bench.executor.run()
                raise RuntimeError("odd")
            return super().__call__(rgb)

    bench.preprocessor.__class__ = Overtaken
    ticket, _ = bench.start(encode_image(), TRUNCATED, encode_image(32, 32))
    bench.executor.run()
    bench.executor.run(1)
    assert bench.refusal(ticket) == (400, "invalid_image", "images[1]")


def test_images_after_a_broken_image_are_not_decoded(bench: Bench) -> None:
    ticket, _ = bench.start(TRUNCATED, *[encode_image()] * 3)
    for _ in range(4):
        bench.executor.run()
    assert bench.refusal(ticket) == (400, "invalid_image", "images[0]")
    assert bench.preprocessor.num_decoded == 0


def test_nothing_is_read_for_a_caller_that_left_before(bench: Bench) -> None:
    ticket, _ = bench.start(b"no image")
    bench.batcher.cancel(ticket)
    bench.executor.run()
    assert type(bench.callers.error(ticket)).__name__ == "Abandoned"
    assert bench.executor.work == []


def test_nothing_is_decoded_after_the_caller_left(bench: Bench) -> None:
    ticket, _ = bench.start(*[encode_image()] * 3)
    bench.executor.run()
    assert bench.preprocessor.num_decoded == 1
    bench.batcher.cancel(ticket)
    assert bench.batcher.reserved_tokens == 0
    bench.executor.run(1)
    bench.executor.run()
    assert bench.preprocessor.num_decoded == 1
    assert (bench.batcher.waiting_images, bench.batcher.reserved_tokens) == (0, 0)


def test_request_without_reserved_tokens_is_not_decoded(callers: Callers) -> None:
    bench = Bench(callers, max_queue_tokens=13)
    waiting, _ = bench.start(encode_image())
    bench.executor.run()
    ticket, _ = bench.start(encode_image(), encode_image())
    bench.executor.run()
    assert (bench.preprocessor.num_decoded, bench.executor.work) == (1, [])
    error = callers.error(ticket)
    assert isinstance(error, ApiError)
    assert (error.status, error.code) == (429, "queue_full")
    bench.batcher.cancel(waiting)
    never, _ = bench.start(*[encode_image()] * 3)
    bench.executor.run()
    assert bench.refusal(never) == (413, "too_many_tokens", None)


def test_tokens_of_a_request_are_limited_before_they_are_reserved(callers: Callers) -> None:
    bench = Bench(callers, max_tokens=11)
    ticket, _ = bench.start(encode_image(), encode_image())
    bench.executor.run()
    assert bench.refusal(ticket) == (413, "too_many_tokens", "images[1]")
    assert bench.preprocessor.num_decoded == 0


def test_unexpected_error_ends_the_request(bench: Bench) -> None:
    class Failing(Counting):
        def __call__(self, rgb: npt.NDArray[np.uint8], *, pin_memory: bool = False) -> Patches:
            raise MemoryError

    ticket, _ = bench.start(encode_image(), encode_image())
    bench.preprocessor.__class__ = Failing
    bench.executor.run()
    bench.executor.run()
    assert isinstance(bench.callers.error(ticket), MemoryError)
    assert bench.batcher.reserved_tokens == 0


def test_number_of_tokens_that_differs_from_the_reserved_one_is_an_error(bench: Bench) -> None:
    class Odd(Counting):
        def num_tokens(self, height: int, width: int) -> int:
            return super().num_tokens(height, width) + 1

    bench.preprocessor.__class__ = Odd
    ticket, _ = bench.start(encode_image())
    bench.executor.run()
    assert isinstance(bench.callers.error(ticket), AssertionError)
    assert bench.batcher.reserved_tokens == 0


@pytest.mark.parametrize("num_images", [1, 3])
def test_failing_queue_ends_the_request(num_images: int, bench: Bench) -> None:
    class Failing(Batcher):
        def put(self, ticket: Ticket, items: Sequence[EncodeItem]) -> None:
            raise RuntimeError("odd")

    ticket, _ = bench.start(*[encode_image()] * num_images)
    bench.batcher.__class__ = Failing
    for _ in range(num_images):
        assert not ticket.ended
        bench.executor.run()
    assert isinstance(bench.callers.error(ticket), RuntimeError)
    assert bench.batcher.reserved_tokens == 0


def test_memory_is_held_until_an_image_is_cut_into_patches(bench: Bench) -> None:
    held: list[int] = []
    bench.preprocessor.meanwhile = lambda: held.append(bench.memory.held_bytes)
    for height, width in ((64, 96), (300, 200), (500, 500)):
        bench.start(encode_image(height, width))
        bench.executor.run()
        resized = bench.preprocessor.num_tokens(height, width) * CONFIG.factor**2
        assert held.pop() >= 3 * (height * width + 2 * resized)  # the image, resized, and its patches
        assert bench.memory.held_bytes == 0


def test_broken_image_releases_its_memory(bench: Bench) -> None:
    ticket, _ = bench.start(TRUNCATED)
    bench.executor.run()
    assert bench.refusal(ticket) == (400, "invalid_image", "images[0]")
    assert bench.memory.held_bytes == 0


def test_memory_limits_the_number_of_images_decoded_at_a_time(bench: Bench) -> None:
    lock = threading.Lock()
    held: list[int] = []
    decoding: list[None] = []
    num_decoding: list[int] = []

    def dawdle() -> None:
        with lock:
            decoding.append(None)
            num_decoding.append(len(decoding))
        time.sleep(0.02)
        with lock:
            decoding.pop()

    bench.preprocessor.meanwhile = lambda: held.append(bench.memory.held_bytes)
    bench.start(encode_image())
    bench.executor.run()
    bench.memory.max_bytes = held[0] * 5 // 2
    bench.preprocessor.meanwhile = dawdle
    for _ in range(6):
        bench.start(encode_image())
    with ThreadPoolExecutor(4) as executor:
        for work in bench.executor.work:
            executor.submit(work)
    assert max(num_decoding) == 2
    assert bench.batcher.waiting_images == 7


def test_nothing_is_decoded_for_a_caller_that_left_during_the_wait_for_memory(bench: Bench) -> None:
    ticket, preparation = bench.start(encode_image())
    with ThreadPoolExecutor(1) as executor, bench.memory.room(bench.memory.max_bytes, lambda: True):
        executor.submit(bench.executor.run)
        eventually(lambda: bench.memory.num_waiting == 1)
        bench.batcher.cancel(ticket)
        preparation.drop()
        eventually(lambda: bench.memory.num_waiting == 0)
    assert bench.preprocessor.num_decoded == 0
    assert (bench.batcher.waiting_images, bench.batcher.reserved_tokens, bench.memory.held_bytes) == (0, 0, 0)

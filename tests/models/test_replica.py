"""A replica with an encoder whose batches end when the test lets them."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from models import (
    BatchResult,
    DeviceError,
    EncodeItem,
    ModelError,
    OutputSpec,
    Patches,
    Replica,
    VisionEncoder,
)
from models.replica import MAX_LAUNCHED
from tests.support.held_encoder import DEVICE_FAULT, HeldEncoder, MakeReplica, image, numbers
from tests.support.waiting import eventually


def test_one_thread_loads_and_launches_and_another_waits() -> None:
    made: list[HeldEncoder] = []

    def load() -> VisionEncoder:
        made.append(HeldEncoder())
        return made[0]  # type: ignore[return-value]

    replica = Replica("cpu", load)
    for number in range(3):
        assert numbers(replica.submit([image(number)]).result(10)) == [number]
    replica.close()
    [encoder] = made
    assert (len(encoder.launch_threads), len(encoder.finish_threads)) == (4, 3)
    threads = {*encoder.launch_threads}, {*encoder.finish_threads}
    assert [len(names) for names in threads] == [1, 1]
    assert len({threading.get_ident()}.union(*threads)) == 3


def test_statistics_have_the_name_of_the_replica(make_replica: MakeReplica) -> None:
    [stats] = make_replica(HeldEncoder(), "cpu:7").submit([image(0)]).result(10).stats
    assert (stats.device, stats.hits) == ("cpu:7", 1)


def test_one_batch_is_launched_while_another_runs(make_replica: MakeReplica) -> None:
    encoder = HeldEncoder()
    encoder.may_finish.clear()
    replica = make_replica(encoder)
    futures = [replica.submit([image(number)]) for number in range(5)]
    eventually(lambda: len(encoder.launches) == MAX_LAUNCHED)
    time.sleep(0.05)
    assert len(encoder.launches) == MAX_LAUNCHED
    encoder.may_finish.set()
    assert [numbers(future.result(10)) for future in futures] == [[0], [1], [2], [3], [4]]
    assert encoder.launches == [[0], [1], [2], [3], [4]]
    assert encoder.max_running == MAX_LAUNCHED


def test_cancelled_batch_does_not_run(make_replica: MakeReplica) -> None:
    encoder = HeldEncoder()
    encoder.may_finish.clear()
    replica = make_replica(encoder)
    launched = [replica.submit([image(number)]) for number in range(MAX_LAUNCHED)]
    eventually(lambda: len(encoder.launches) == MAX_LAUNCHED)
    cancelled, last = replica.submit([image(8)]), replica.submit([image(9)])
    assert not launched[0].cancel()
    assert cancelled.cancel()
    encoder.may_finish.set()
    assert numbers(last.result(10)) == [9]
    assert encoder.launches == [[0], [1], [9]]


def test_failed_load_fails_ready_and_every_batch() -> None:
    def load() -> VisionEncoder:
        raise ModelError("no such model")

    replica = Replica("cpu", load)
    batches = [replica.submit([image(0)]) for _ in range(MAX_LAUNCHED + 1)]
    with pytest.raises(ModelError, match="no such model"):
        replica.ready.result(10)
    for batch in batches:
        with pytest.raises(ModelError, match="no such model"):
            batch.result(10)
    replica.close()


@pytest.mark.parametrize("step", ["fail_launch", "fail_wait"])
@pytest.mark.parametrize("error", [ValueError("odd grid"), SystemExit("a library has called sys.exit")])
def test_error_in_one_batch_does_not_affect_the_next(
    step: str, error: BaseException, make_replica: MakeReplica
) -> None:
    encoder = HeldEncoder()
    replica = make_replica(encoder)
    setattr(encoder, step, error)
    failed = [replica.submit([image(0)]) for _ in range(MAX_LAUNCHED + 1)]
    for future in failed:
        assert future.exception(10) is error
    setattr(encoder, step, None)
    assert numbers(replica.submit([image(1)]).result(10)) == [1]


class OutOfMemory(HeldEncoder):
    """Fails if a batch has more than one image. Records how many tensors of failed batches still exist."""

    def __init__(self, *, chained: bool) -> None:
        super().__init__()
        self._chained = chained
        self._allocated: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []

    def launch(self, items: Sequence[EncodeItem]) -> Any:
        self.alive.append(sum(tensor() is not None for tensor in self._allocated))
        if len(items) == 1:
            return super().launch(items)
        if not self._chained:
            self._forward()
        try:
            self._forward()
        except torch.OutOfMemoryError as error:
            raise RuntimeError("a library's own words") from error

    def _forward(self) -> None:
        activations = torch.zeros(4)
        self._allocated.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("no memory")


@pytest.mark.parametrize("chained", [False, True])
def test_memory_of_a_failed_batch_is_free_when_its_images_run_again(
    chained: bool, make_replica: MakeReplica, no_collection: None
) -> None:
    encoder, batches = OutOfMemory(chained=chained), Batches()
    serving = make_replica(encoder).serve(batches)
    failed = batches.put(image(1), image(2))  # the future, and so the error, exists until the end of the test
    assert isinstance(failed.exception(10), RuntimeError)
    for number in (1, 2):
        assert numbers(batches.put(image(number)).result(10)) == [number]
    batches.end()
    serving.result(10)
    assert encoder.alive == [0, 0, 0]


@pytest.mark.parametrize("step", ["launch", "end"])
def test_error_of_a_batch_does_not_hold_its_future(
    step: str, make_replica: MakeReplica, no_collection: None
) -> None:
    error = ValueError("odd grid")
    encoder = HeldEncoder(**{"fail_launch" if step == "launch" else "fail_wait": error})
    future = make_replica(encoder).submit([image(0)])
    assert future.exception(10) is error
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    assert frames == ["launch" if step == "launch" else "wait_for_device"]


def test_error_of_loading_does_not_end_coroutines_that_caught_it() -> None:
    """`clear_frames` would end such a coroutine."""

    def load() -> VisionEncoder:
        raise ModelError("no such model")

    async def catch_and_continue() -> BaseException | None:
        try:
            await asyncio.wrap_future(replica.ready)
        except ModelError:
            batch = asyncio.wrap_future(replica.submit([image(0)]))
            await asyncio.wait([batch])
            return batch.exception()
        return None

    replica = Replica("cpu", load)
    assert isinstance(asyncio.run(asyncio.wait_for(catch_and_continue(), 10)), ModelError)
    replica.close()


@pytest.mark.parametrize("step", ["fail_launch", "fail_wait"])
def test_error_of_a_device_fault_names_the_device(step: str, make_replica: MakeReplica) -> None:
    encoder = HeldEncoder(**{step: DEVICE_FAULT})
    error = make_replica(encoder, "cuda:3").submit([image(0)]).exception(10)
    assert isinstance(error, DeviceError)
    assert (error.device, error.__cause__) == ("cuda:3", DEVICE_FAULT)
    assert str(error) == "device cuda:3 is lost: illegal memory access"


def test_device_fault_is_found_behind_the_error_of_a_library(make_replica: MakeReplica) -> None:
    encoder = HeldEncoder(fail_wait=RuntimeError("Triton Error [CUDA]: an illegal memory access"))
    encoder.fault = DEVICE_FAULT
    error = make_replica(encoder, "cuda:3").submit([image(0)]).exception(10)
    assert isinstance(error, DeviceError)
    assert error.__cause__ == DEVICE_FAULT


def test_close_waits_for_submitted_batches_and_accepts_no_more() -> None:
    replica = Replica("cpu", HeldEncoder)  # type: ignore[arg-type]
    futures = [replica.submit([image(number)]) for number in range(5)]
    replica.close()
    assert all(future.done() for future in futures)
    with pytest.raises(RuntimeError):
        replica.submit([image(0)])


class Batches:
    """A queue of the batches that a test has put in. `take` waits for the next."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Sequence[EncodeItem], Future[BatchResult]] | BaseException | None] = (
            queue.Queue()
        )
        self.num_taken = 0

    def put(self, *items: EncodeItem) -> Future[BatchResult]:
        future: Future[BatchResult] = Future()
        self._queue.put((items, future))
        return future

    def end(self, error: BaseException | None = None) -> None:
        self._queue.put(error)

    def take(self) -> tuple[Sequence[EncodeItem], Future[BatchResult]] | None:
        taken = self._queue.get(timeout=10)
        if isinstance(taken, BaseException):
            raise taken
        self.num_taken += taken is not None
        return taken


def test_serving_ends_with_the_queue(make_replica: MakeReplica) -> None:
    encoder, batches = HeldEncoder(), Batches()
    replica = make_replica(encoder, "cuda:1")
    serving = replica.serve(batches)
    first, second = batches.put(image(1), image(2)), batches.put(image(3))
    assert [numbers(first.result(10)), numbers(second.result(10))] == [[1, 2], [3]]
    assert first.result().stats[0].device == "cuda:1"
    assert not serving.done()
    batches.end()
    assert serving.result(10) is None
    assert len(set(encoder.launch_threads[1:])) == 1
    assert numbers(replica.submit([image(4)]).result(10)) == [4]  # all places are free again


def test_batch_is_taken_only_when_the_device_has_a_place(make_replica: MakeReplica) -> None:
    encoder, batches = HeldEncoder(), Batches()
    encoder.may_finish.clear()
    serving = make_replica(encoder).serve(batches)
    futures = [batches.put(image(n)) for n in range(MAX_LAUNCHED + 2)]
    eventually(lambda: batches.num_taken == MAX_LAUNCHED)
    time.sleep(0.02)
    assert batches.num_taken == MAX_LAUNCHED
    batches.end()
    encoder.may_finish.set()
    assert [numbers(future.result(10)) for future in futures] == [[n] for n in range(MAX_LAUNCHED + 2)]
    serving.result(10)
    assert encoder.max_running <= MAX_LAUNCHED


def test_finished_batch_is_not_held_while_the_next_is_awaited(make_replica: MakeReplica) -> None:
    batches = Batches()
    serving = make_replica(HeldEncoder()).serve(batches)
    pixels = torch.zeros((4, 1), dtype=torch.uint8)
    future = batches.put(EncodeItem(Patches(pixels, (1, 2, 2), 1), OutputSpec()))
    held = [weakref.ref(pixels), weakref.ref(future.result(10).embeddings[0])]
    del pixels, future
    eventually(lambda: [reference() for reference in held] == [None, None])
    batches.end()
    serving.result(10)


def test_serving_continues_after_a_failed_batch(make_replica: MakeReplica) -> None:
    encoder, batches = HeldEncoder(fail_launch=RuntimeError("odd shape")), Batches()
    serving = make_replica(encoder).serve(batches)
    failed = [batches.put(image(n)) for n in range(MAX_LAUNCHED + 1)]
    assert {str(future.exception(10)) for future in failed} == {"odd shape"}
    encoder.fail_launch = None
    encoder.fail_wait = RuntimeError("out of memory")
    failed = [batches.put(image(n)) for n in range(MAX_LAUNCHED + 1)]
    assert {str(future.exception(10)) for future in failed} == {"out of memory"}
    encoder.fail_wait = None
    assert numbers(batches.put(image(5)).result(10)) == [5]
    batches.end()
    serving.result(10)


def test_lost_device_fails_its_batches_and_serving_continues(make_replica: MakeReplica) -> None:
    encoder, batches = HeldEncoder(fail_wait=DEVICE_FAULT), Batches()
    serving = make_replica(encoder).serve(batches)
    assert isinstance(batches.put(image(1)).exception(10), DeviceError)
    assert not serving.done()  # the queue decides when it ends
    batches.end()
    serving.result(10)


@pytest.mark.parametrize("error", [ValueError("no batch"), SystemExit()])
def test_error_of_the_queue_ends_serving(make_replica: MakeReplica, error: BaseException) -> None:
    batches = Batches()
    serving = make_replica(HeldEncoder()).serve(batches)
    batches.end(error)
    assert serving.exception(10) is error


def test_no_batch_is_taken_after_a_failed_load() -> None:
    def load() -> VisionEncoder:
        raise ModelError("no such folder")

    batches = Batches()
    replica = Replica("cpu", load)
    assert isinstance(replica.serve(batches).exception(10), ModelError)
    assert batches.num_taken == 0
    replica.close()

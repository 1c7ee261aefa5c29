"""Replicas and groups of them, with an encoder whose batches end when the test says so."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from models import (
    BatchResult,
    BatchStats,
    DeviceError,
    EncodeItem,
    ModelError,
    OutputSpec,
    Patches,
    Replica,
    ReplicaGroup,
    VisionEncoder,
)
from models.replica import MAX_LAUNCHED

LOST = torch.AcceleratorError("illegal memory access")


class Running:
    """A batch on the device."""

    def __init__(self, encoder: Encoder, items: Sequence[EncodeItem]) -> None:
        self._encoder = encoder
        self._items = items
        self._started_at = time.perf_counter()

    def wait_for_device(self) -> None:
        encoder = self._encoder
        encoder.finish_threads.append(threading.get_ident())
        assert encoder.may_finish.wait(10), "the test never let the batch end"
        encoder.num_running -= 1
        if encoder.fail_wait is not None:
            raise encoder.fail_wait

    def collect(self) -> BatchResult:
        items = self._items
        embeddings = tuple(torch.tensor([number_of(item)]) for item in items)
        num_tokens = sum(item.patches.num_tokens for item in items)
        stats = BatchStats("own name", len(items), num_tokens, len(items), {}, {64: 1}, 0, 0.1)
        return BatchResult(embeddings, (stats,), self._started_at, time.perf_counter())


class Encoder:
    """Answers each image with its number. Batches end once `may_finish` is set."""

    def __init__(
        self, *, fail_launch: BaseException | None = None, fail_wait: BaseException | None = None
    ) -> None:
        self.launches: list[list[float]] = []  # numbers of the images of each batch
        self.launch_threads: list[int] = [threading.get_ident()]
        self.finish_threads: list[int] = []
        self.may_finish = threading.Event()
        self.may_finish.set()
        self.num_running = 0
        self.most_running = 0
        self.fail_launch = fail_launch
        self.fail_wait = fail_wait
        self.fault: BaseException | None = None  # of the device, which `check_device` finds

    def check_device(self) -> None:
        if self.fault is not None:
            raise self.fault

    def launch(self, items: Sequence[EncodeItem]) -> Any:
        self.launch_threads.append(threading.get_ident())
        self.launches.append([number_of(item) for item in items])
        if self.fail_launch is not None:
            raise self.fail_launch
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        return Running(self, items)


def image(number: int, rows: int = 4) -> EncodeItem:
    pixels = torch.full((rows, 1), number, dtype=torch.uint8)
    return EncodeItem(Patches(pixels, (1, 2, rows // 2), rows // 4), OutputSpec())


def number_of(item: EncodeItem) -> float:
    return float(item.patches.pixels[0, 0])


def numbers(result: BatchResult) -> list[float]:
    return [float(embedding) for embedding in result.embeddings]


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.002)


Make = Callable[..., Replica]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes replicas of encoders, and lets them end."""
    made: list[tuple[Replica, Encoder]] = []

    def make_replica(encoder: Encoder, name: str = "cpu") -> Replica:
        made.append((Replica(name, lambda: encoder), encoder))  # type: ignore[arg-type,return-value]
        return made[-1][0]

    yield make_replica
    for replica, encoder in made:
        encoder.may_finish.set()
        replica.close()


@pytest.fixture
def group_of(make: Make) -> Callable[..., ReplicaGroup]:
    def make_group(*encoders: Encoder) -> ReplicaGroup:
        return ReplicaGroup([make(encoder, f"cpu:{index}") for index, encoder in enumerate(encoders)])

    return make_group


GroupOf = Callable[..., ReplicaGroup]


def test_loads_and_launches_in_one_thread_and_waits_in_another() -> None:
    made: list[Encoder] = []

    def load() -> VisionEncoder:
        made.append(Encoder())
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


def test_statistics_carry_the_replicas_name(make: Make) -> None:
    [stats] = make(Encoder(), "cpu:7").submit([image(0)]).result(10).stats
    assert (stats.device, stats.hits) == ("cpu:7", 1)


def test_a_batch_is_launched_while_another_runs_and_no_more(make: Make) -> None:
    encoder = Encoder()
    encoder.may_finish.clear()
    replica = make(encoder)
    futures = [replica.submit([image(number)]) for number in range(5)]
    eventually(lambda: len(encoder.launches) == MAX_LAUNCHED)
    time.sleep(0.05)
    assert len(encoder.launches) == MAX_LAUNCHED
    encoder.may_finish.set()
    assert [numbers(future.result(10)) for future in futures] == [[0], [1], [2], [3], [4]]
    assert encoder.launches == [[0], [1], [2], [3], [4]]
    assert encoder.most_running == MAX_LAUNCHED


def test_a_cancelled_batch_is_left_out(make: Make) -> None:
    encoder = Encoder()
    encoder.may_finish.clear()
    replica = make(encoder)
    launched = [replica.submit([image(number)]) for number in range(MAX_LAUNCHED)]
    eventually(lambda: len(encoder.launches) == MAX_LAUNCHED)
    left, last = replica.submit([image(8)]), replica.submit([image(9)])
    assert not launched[0].cancel()
    assert left.cancel()
    encoder.may_finish.set()
    assert numbers(last.result(10)) == [9]
    assert encoder.launches == [[0], [1], [9]]


def test_a_failed_load_is_the_error_of_ready_and_of_every_batch() -> None:
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
def test_an_error_in_one_batch_leaves_the_next_alone(step: str, make: Make) -> None:
    encoder = Encoder()
    replica = make(encoder)
    setattr(encoder, step, ValueError("odd grid"))
    failed = [replica.submit([image(0)]) for _ in range(MAX_LAUNCHED + 1)]
    for future in failed:
        with pytest.raises(ValueError, match="odd grid"):
            future.result(10)
    setattr(encoder, step, None)
    assert numbers(replica.submit([image(1)]).result(10)) == [1]


class OutOfMemory(Encoder):
    """Fails over more than one image, and notes how many tensors of failed ones are left."""

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
def test_images_run_again_without_what_the_failed_batch_allocated(
    chained: bool, make: Make, no_collection: None
) -> None:
    encoder, batches = OutOfMemory(chained=chained), Batches()
    serving = make(encoder).serve(batches)
    failed = batches.put(image(1), image(2))  # held, as the error is, until all is over
    assert isinstance(failed.exception(10), RuntimeError)
    for number in (1, 2):
        assert numbers(batches.put(image(number)).result(10)) == [number]
    batches.end()
    serving.result(10)
    assert encoder.alive == [0, 0, 0]


@pytest.mark.parametrize("step", ["launch", "end"])
def test_the_error_of_a_batch_does_not_hold_its_future(step: str, make: Make, no_collection: None) -> None:
    error = ValueError("odd grid")
    encoder = Encoder(**{"fail_launch" if step == "launch" else "fail_wait": error})
    future = make(encoder).submit([image(0)])
    assert future.exception(10) is error
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    assert frames == ["launch" if step == "launch" else "wait_for_device"]


def test_the_error_of_loading_leaves_alone_who_else_waits_for_it() -> None:
    """`clear_frames` would end a coroutine that has caught the error and goes on."""

    def load() -> VisionEncoder:
        raise ModelError("no such model")

    async def wait_and_go_on() -> BaseException | None:
        try:
            await asyncio.wrap_future(replica.ready)
        except ModelError:
            batch = asyncio.wrap_future(replica.submit([image(0)]))
            await asyncio.wait([batch])
            return batch.exception()
        return None

    replica = Replica("cpu", load)
    assert isinstance(asyncio.run(asyncio.wait_for(wait_and_go_on(), 10)), ModelError)
    replica.close()


@pytest.mark.parametrize("step", ["fail_launch", "fail_wait"])
def test_a_fault_of_the_device_names_it(step: str, make: Make) -> None:
    encoder = Encoder(**{step: LOST})
    error = make(encoder, "cuda:3").submit([image(0)]).exception(10)
    assert isinstance(error, DeviceError)
    assert (error.device, error.__cause__) == ("cuda:3", LOST)
    assert str(error) == "device cuda:3 is lost: illegal memory access"


def test_a_fault_that_a_library_raised_as_something_else_is_found(make: Make) -> None:
    encoder = Encoder(fail_wait=RuntimeError("Triton Error [CUDA]: an illegal memory access"))
    encoder.fault = LOST
    error = make(encoder, "cuda:3").submit([image(0)]).exception(10)
    assert isinstance(error, DeviceError)
    assert error.__cause__ == LOST


def test_close_waits_for_what_was_submitted_and_takes_no_more() -> None:
    replica = Replica("cpu", Encoder)  # type: ignore[arg-type]
    futures = [replica.submit([image(number)]) for number in range(5)]
    replica.close()
    assert all(future.done() for future in futures)
    with pytest.raises(RuntimeError):
        replica.submit([image(0)])


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_a_call_is_shared_out_and_comes_back_in_order(num_replicas: int, group_of: GroupOf) -> None:
    encoders = [Encoder() for _ in range(num_replicas)]
    group = group_of(*encoders)
    items = [image(number, rows=4 * (1 + number * 7 % 5)) for number in range(6)]
    result = group.submit(items).result(10)
    assert numbers(result) == [0, 1, 2, 3, 4, 5]
    busy = min(num_replicas, len(items))
    assert [len(encoder.launches) for encoder in encoders] == [1] * busy + [0] * (num_replicas - busy)
    assert sorted(number for e in encoders for batch in e.launches for number in batch) == [0, 1, 2, 3, 4, 5]
    assert sorted(stats.device for stats in result.stats) == [f"cpu:{index}" for index in range(busy)]
    assert sum(stats.num_images for stats in result.stats) == 6
    assert result.started_at <= result.finished_at


def test_shares_are_balanced_by_size(group_of: GroupOf) -> None:
    encoders = [Encoder(), Encoder()]
    items = [image(0, 40), image(1, 4), image(2, 4), image(3, 4), image(4, 20)]
    assert numbers(group_of(*encoders).submit(items).result(10)) == [0, 1, 2, 3, 4]
    assert sorted(encoder.launches for encoder in encoders) == [[[0]], [[1, 2, 3, 4]]]


def test_calls_go_where_least_is_to_be_done(group_of: GroupOf) -> None:
    encoders = [Encoder(), Encoder()]
    for encoder in encoders:
        encoder.may_finish.clear()
    group = group_of(*encoders)
    large = group.submit([image(0, 40)])
    small = [group.submit([image(number, 12)]) for number in (1, 2, 3)]
    eventually(lambda: encoders[1].launches == [[1], [2]])
    for encoder in encoders:
        encoder.may_finish.set()
    for future in (large, *small):
        future.result(10)
    assert encoders[0].launches == [[0]]
    assert encoders[1].launches == [[1], [2], [3]]
    eventually(lambda: not any(group._loads))
    group.submit([image(4)]).result(10)
    assert encoders[0].launches == [[0], [4]]


def test_no_images_are_no_work_to_wait_for(group_of: GroupOf) -> None:
    assert group_of(Encoder(), Encoder()).submit([]).result(10).embeddings == ()


@pytest.mark.parametrize("error", [ValueError("odd grid"), LOST])
def test_a_call_with_a_failed_share_fails_after_the_others(error: Exception, group_of: GroupOf) -> None:
    slow = Encoder()
    slow.may_finish.clear()
    broken = Encoder(fail_wait=error)
    future = group_of(slow, broken).submit([image(0), image(1)])
    eventually(lambda: len(broken.finish_threads) == 1)
    time.sleep(0.02)
    assert not future.done()
    slow.may_finish.set()
    raised = future.exception(10)
    assert raised is error if isinstance(error, ValueError) else raised.__cause__ is error  # type: ignore[union-attr]


def test_the_loss_of_a_device_is_told_before_other_errors(group_of: GroupOf) -> None:
    for encoders in (
        [Encoder(fail_wait=LOST), Encoder(fail_wait=ValueError("odd grid"))],
        [Encoder(fail_wait=ValueError("odd grid")), Encoder(fail_wait=LOST)],
    ):
        with pytest.raises(DeviceError):
            group_of(*encoders).submit([image(0), image(1)]).result(10)


def test_a_lost_device_gets_nothing_more_while_another_is_left(group_of: GroupOf) -> None:
    lost, healthy = Encoder(fail_wait=LOST), Encoder()
    group = group_of(lost, healthy)
    with pytest.raises(DeviceError):
        group.submit([image(0)]).result(10)
    for _ in range(3):
        assert numbers(group.submit([image(1), image(2)]).result(10)) == [1, 2]
    assert lost.launches == [[0]]


def test_calls_end_with_an_error_when_every_device_is_lost(group_of: GroupOf) -> None:
    group = group_of(Encoder(fail_wait=LOST), Encoder(fail_wait=LOST))
    for _ in range(4):
        with pytest.raises(DeviceError):
            group.submit([image(0), image(1)]).result(10)


def test_an_error_that_is_not_the_devices_keeps_it_in_service(group_of: GroupOf) -> None:
    odd = Encoder(fail_wait=ValueError("odd grid"))
    group = group_of(odd, Encoder())
    with pytest.raises(ValueError, match="odd grid"):
        group.submit([image(0)]).result(10)
    odd.fail_wait = None
    assert numbers(group.submit([image(1), image(2)]).result(10)) == [1, 2]
    assert len(odd.launches) == 2


def test_a_call_that_one_replica_takes_can_be_cancelled(group_of: GroupOf) -> None:
    encoder = Encoder()
    encoder.may_finish.clear()
    group = group_of(encoder)
    waiting = [group.submit([image(number)]) for number in range(MAX_LAUNCHED)]
    left = group.submit([image(9), image(9)])
    assert left.cancel()
    encoder.may_finish.set()
    for future in waiting:
        future.result(10)
    eventually(lambda: group._loads == [0])
    assert encoder.launches == [[0], [1]]


def test_a_closed_replica_fails_its_share(group_of: GroupOf) -> None:
    group = group_of(Encoder(), Encoder())
    group.replicas[1].close()
    both: Future[BatchResult] = group.submit([image(0), image(1)])
    with pytest.raises(RuntimeError):
        both.result(10)
    group.close()
    with pytest.raises(RuntimeError):
        group.submit([image(0)]).result(10)


def test_the_encoder_itself_runs_in_a_group() -> None:
    demo = VisionEncoder.from_pretrained("demo", device="cpu")
    group = ReplicaGroup([Replica(name, lambda: demo) for name in ("cpu:0", "cpu:1")])
    patches = [
        demo.preprocess(torch.full((256, 256 + 64 * n, 3), 50 * n, dtype=torch.uint8).numpy())
        for n in range(3)
    ]
    result = group.submit([EncodeItem(x, OutputSpec()) for x in patches]).result(60)
    group.close()
    for ours, theirs in zip(result.embeddings, demo.encode(patches), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)
    assert [stats.misses for stats in result.stats] == [
        {"disabled": stats.num_images} for stats in result.stats
    ]


class Batches:
    """Gives a replica what the test has put in, and lets it wait otherwise."""

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


def test_serving_takes_batches_until_there_are_no_more(make: Make) -> None:
    encoder, batches = Encoder(), Batches()
    replica = make(encoder, "cuda:1")
    serving = replica.serve(batches)
    first, second = batches.put(image(1), image(2)), batches.put(image(3))
    assert [numbers(first.result(10)), numbers(second.result(10))] == [[1, 2], [3]]
    assert first.result().stats[0].device == "cuda:1"
    assert not serving.done()
    batches.end()
    assert serving.result(10) is None
    assert len(set(encoder.launch_threads[1:])) == 1
    assert numbers(replica.submit([image(4)]).result(10)) == [4]  # all places are free again


def test_serving_takes_a_batch_only_when_the_device_has_a_place(make: Make) -> None:
    encoder, batches = Encoder(), Batches()
    encoder.may_finish.clear()
    serving = make(encoder).serve(batches)
    futures = [batches.put(image(n)) for n in range(MAX_LAUNCHED + 2)]
    eventually(lambda: batches.num_taken == MAX_LAUNCHED)
    time.sleep(0.02)
    assert batches.num_taken == MAX_LAUNCHED
    batches.end()
    encoder.may_finish.set()
    assert [numbers(future.result(10)) for future in futures] == [[n] for n in range(MAX_LAUNCHED + 2)]
    serving.result(10)
    assert encoder.most_running <= MAX_LAUNCHED


def test_serving_does_not_hold_a_batch_while_it_waits_for_the_next(make: Make) -> None:
    batches = Batches()
    serving = make(Encoder()).serve(batches)
    pixels = torch.zeros((4, 1), dtype=torch.uint8)
    future = batches.put(EncodeItem(Patches(pixels, (1, 2, 2), 1), OutputSpec()))
    held = [weakref.ref(pixels), weakref.ref(future.result(10).embeddings[0])]
    del pixels, future
    eventually(lambda: [reference() for reference in held] == [None, None])
    batches.end()
    serving.result(10)


def test_serving_goes_on_after_a_batch_that_failed(make: Make) -> None:
    encoder, batches = Encoder(fail_launch=RuntimeError("odd shape")), Batches()
    serving = make(encoder).serve(batches)
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


def test_a_lost_device_ends_its_batches_and_not_the_serving(make: Make) -> None:
    encoder, batches = Encoder(fail_wait=LOST), Batches()
    serving = make(encoder).serve(batches)
    assert isinstance(batches.put(image(1)).exception(10), DeviceError)
    assert not serving.done()  # who gives the batches decides
    batches.end()
    serving.result(10)


@pytest.mark.parametrize("error", [ValueError("no batch"), SystemExit()])
def test_serving_ends_with_what_no_batch_can_be_blamed_for(make: Make, error: BaseException) -> None:
    batches = Batches()
    serving = make(Encoder()).serve(batches)
    batches.end(error)
    assert serving.exception(10) is error


def test_nothing_is_taken_where_the_model_could_not_be_loaded() -> None:
    def load() -> VisionEncoder:
        raise ModelError("no such folder")

    batches = Batches()
    replica = Replica("cpu", load)
    assert isinstance(replica.serve(batches).exception(10), ModelError)
    assert batches.num_taken == 0
    replica.close()

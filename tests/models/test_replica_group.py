"""A group of replicas with encoders whose batches end when the test lets them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch

from models import BatchResult, DeviceError, EncodeItem, OutputSpec, Replica, ReplicaGroup, VisionEncoder
from models.replica import MAX_LAUNCHED
from tests.support.held_encoder import DEVICE_FAULT, HeldEncoder, MakeReplica, image, numbers
from tests.support.waiting import eventually

MakeGroup = Callable[..., ReplicaGroup]


@pytest.fixture
def make_group(make_replica: MakeReplica) -> MakeGroup:
    def make(*encoders: HeldEncoder) -> ReplicaGroup:
        return ReplicaGroup([make_replica(encoder, f"cpu:{index}") for index, encoder in enumerate(encoders)])

    return make


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_shared_call_keeps_its_order(num_replicas: int, make_group: MakeGroup) -> None:
    encoders = [HeldEncoder() for _ in range(num_replicas)]
    group = make_group(*encoders)
    items = [image(number, rows=4 * (1 + number * 7 % 5)) for number in range(6)]
    result = group.submit(items).result(10)
    assert numbers(result) == [0, 1, 2, 3, 4, 5]
    busy = min(num_replicas, len(items))
    assert [len(encoder.launches) for encoder in encoders] == [1] * busy + [0] * (num_replicas - busy)
    assert sorted(number for e in encoders for batch in e.launches for number in batch) == [0, 1, 2, 3, 4, 5]
    assert sorted(stats.device for stats in result.stats) == [f"cpu:{index}" for index in range(busy)]
    assert sum(stats.num_images for stats in result.stats) == 6
    assert result.started_at <= result.finished_at


def test_shares_are_balanced_by_size(make_group: MakeGroup) -> None:
    encoders = [HeldEncoder(), HeldEncoder()]
    items = [image(0, 40), image(1, 4), image(2, 4), image(3, 4), image(4, 20)]
    assert numbers(make_group(*encoders).submit(items).result(10)) == [0, 1, 2, 3, 4]
    assert sorted(encoder.launches for encoder in encoders) == [[[0]], [[1, 2, 3, 4]]]


def test_call_goes_to_the_replica_with_the_least_load(make_group: MakeGroup) -> None:
    encoders = [HeldEncoder(), HeldEncoder()]
    for encoder in encoders:
        encoder.may_finish.clear()
    group = make_group(*encoders)
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


def test_call_without_images_ends(make_group: MakeGroup) -> None:
    assert make_group(HeldEncoder(), HeldEncoder()).submit([]).result(10).embeddings == ()


@pytest.mark.parametrize("error", [ValueError("odd grid"), DEVICE_FAULT])
def test_call_with_a_failed_share_fails_after_its_other_shares(
    error: Exception, make_group: MakeGroup
) -> None:
    slow = HeldEncoder()
    slow.may_finish.clear()
    broken = HeldEncoder(fail_wait=error)
    future = make_group(slow, broken).submit([image(0), image(1)])
    eventually(lambda: len(broken.finish_threads) == 1)
    time.sleep(0.02)
    assert not future.done()
    slow.may_finish.set()
    raised = future.exception(10)
    assert raised is error if isinstance(error, ValueError) else raised.__cause__ is error  # type: ignore[union-attr]


def test_lost_device_takes_precedence_over_other_errors(make_group: MakeGroup) -> None:
    for encoders in (
        [HeldEncoder(fail_wait=DEVICE_FAULT), HeldEncoder(fail_wait=ValueError("odd grid"))],
        [HeldEncoder(fail_wait=ValueError("odd grid")), HeldEncoder(fail_wait=DEVICE_FAULT)],
    ):
        with pytest.raises(DeviceError):
            make_group(*encoders).submit([image(0), image(1)]).result(10)


def test_lost_device_gets_no_calls_while_another_works(make_group: MakeGroup) -> None:
    lost, healthy = HeldEncoder(fail_wait=DEVICE_FAULT), HeldEncoder()
    group = make_group(lost, healthy)
    with pytest.raises(DeviceError):
        group.submit([image(0)]).result(10)
    for _ in range(3):
        assert numbers(group.submit([image(1), image(2)]).result(10)) == [1, 2]
    assert lost.launches == [[0]]


def test_calls_fail_when_every_device_is_lost(make_group: MakeGroup) -> None:
    group = make_group(HeldEncoder(fail_wait=DEVICE_FAULT), HeldEncoder(fail_wait=DEVICE_FAULT))
    for _ in range(4):
        with pytest.raises(DeviceError):
            group.submit([image(0), image(1)]).result(10)


def test_device_stays_in_service_after_other_errors(make_group: MakeGroup) -> None:
    odd = HeldEncoder(fail_wait=ValueError("odd grid"))
    group = make_group(odd, HeldEncoder())
    with pytest.raises(ValueError, match="odd grid"):
        group.submit([image(0)]).result(10)
    odd.fail_wait = None
    assert numbers(group.submit([image(1), image(2)]).result(10)) == [1, 2]
    assert len(odd.launches) == 2


def test_call_with_one_share_can_be_cancelled(make_group: MakeGroup) -> None:
    encoder = HeldEncoder()
    encoder.may_finish.clear()
    group = make_group(encoder)
    waiting = [group.submit([image(number)]) for number in range(MAX_LAUNCHED)]
    cancelled = group.submit([image(9), image(9)])
    assert cancelled.cancel()
    encoder.may_finish.set()
    for future in waiting:
        future.result(10)
    eventually(lambda: group._loads == [0])
    assert encoder.launches == [[0], [1]]


def test_closed_replica_fails_its_share(make_group: MakeGroup) -> None:
    group = make_group(HeldEncoder(), HeldEncoder())
    group.replicas[1].close()
    both: Future[BatchResult] = group.submit([image(0), image(1)])
    with pytest.raises(RuntimeError):
        both.result(10)
    group.close()
    with pytest.raises(RuntimeError):
        group.submit([image(0)]).result(10)


def test_group_of_real_encoders_gives_the_same_tokens() -> None:
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

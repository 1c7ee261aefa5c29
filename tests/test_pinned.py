from __future__ import annotations

import gc
import weakref

import pytest
import torch

from models.pinned import PinnedPool, view_of


class Event:
    def __init__(self) -> None:
        self.is_reached = False

    def query(self) -> bool:
        return self.is_reached


@pytest.fixture
def pool() -> PinnedPool:
    return PinnedPool(torch.device("cpu"))


@pytest.mark.parametrize(("wanted", "size"), [(1, 4096), (4096, 4096), (4097, 8192), (5_000_000, 2**23)])
def test_a_new_block_is_a_power_of_two(pool: PinnedPool, wanted: int, size: int) -> None:
    assert pool.take(wanted).nbytes == size


def test_a_block_that_was_given_back_is_taken_again(pool: PinnedPool) -> None:
    block = pool.take(10_000)
    assert pool.take(10_000).data_ptr() != block.data_ptr()
    pool.give_back(block)
    assert pool.take(9_000).data_ptr() == block.data_ptr()
    assert pool.take(9_000).data_ptr() != block.data_ptr()


def test_the_smallest_that_is_large_enough_is_taken(pool: PinnedPool) -> None:
    large, small, tiny = pool.take(100_000), pool.take(20_000), pool.take(10)
    for block in (large, small, tiny):
        pool.give_back(block)
    assert pool.take(15_000).data_ptr() == small.data_ptr()
    assert pool.take(15_000).data_ptr() == large.data_ptr()


def test_a_block_is_not_free_before_the_device_has_read_it(pool: PinnedPool) -> None:
    block, event = pool.take(10_000), Event()
    pool.give_back(block, event)
    assert pool.take(10_000).data_ptr() != block.data_ptr()
    event.is_reached = True
    assert pool.take(10_000).data_ptr() == block.data_ptr()


def test_a_view_is_of_the_first_bytes() -> None:
    block = torch.arange(64, dtype=torch.uint8)
    view = view_of(block, (2, 3), torch.int16)
    assert view.shape == (2, 3)
    assert view.data_ptr() == block.data_ptr()
    assert int(view[0, 1]) == 2 + 3 * 256
    assert view_of(block, (0, 5), torch.float32).shape == (0, 5)


def test_memory_stays_with_the_pool_whoever_forgets_it(pool: PinnedPool) -> None:
    seen = weakref.ref(pool.take(10_000))
    gc.collect()
    assert seen() is not None

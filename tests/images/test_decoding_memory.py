from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from service.images.decoding_memory import DecodingMemory
from tests.support.waiting import eventually


def always() -> bool:
    return True


class Holder:
    """A thread that reserves bytes until `leave` is called."""

    def __init__(self, memory: DecodingMemory, num_bytes: int) -> None:
        self._memory = memory
        self._num_bytes = num_bytes
        self.is_wanted = True
        self.has_room: bool | None = None  # None: still waiting
        self._may_leave = threading.Event()

    def run(self) -> None:
        with self._memory.room(self._num_bytes, lambda: self.is_wanted) as self.has_room:
            if self.has_room:
                assert self._may_leave.wait(10)

    def leave(self) -> None:
        self._may_leave.set()


class Holders:
    """Threads that ask for room one after the other."""

    def __init__(self, memory: DecodingMemory, executor: ThreadPoolExecutor) -> None:
        self._memory = memory
        self._executor = executor
        self._all: list[tuple[Holder, Future[None]]] = []

    def add(self, num_bytes: int) -> Holder:
        num_waiting = self._memory.num_waiting
        holder = Holder(self._memory, num_bytes)
        self._all.append((holder, self._executor.submit(holder.run)))
        eventually(lambda: holder.has_room is not None or self._memory.num_waiting > num_waiting)
        return holder

    def end(self) -> None:
        for holder, _ in self._all:
            holder.is_wanted = False
            holder.leave()
        self._memory.look_again()
        for _, running in self._all:
            running.result(10)


@contextmanager
def holders(memory: DecodingMemory) -> Iterator[Holders]:
    """Ends all threads at the end, and checks that nothing is reserved."""
    with ThreadPoolExecutor(8) as executor:
        group = Holders(memory, executor)
        try:
            yield group
        finally:
            group.end()
    assert (memory.held_bytes, memory.num_waiting) == (0, 0)


@pytest.mark.parametrize(
    ("num_servers", "largest_bytes", "max_bytes"), [(1, 5, 2**30), (4, 5, 2**28), (4, 2**29, 2**29)]
)
def test_api_servers_share_memory_and_each_has_enough_for_the_largest_image(
    num_servers: int, largest_bytes: int, max_bytes: int
) -> None:
    assert DecodingMemory.share(num_servers, largest_bytes).max_bytes == max_bytes


def test_room_is_held_until_the_block_ends() -> None:
    memory = DecodingMemory(100)
    with memory.room(60, always) as first, memory.room(40, always) as second:
        assert (first, second, memory.held_bytes) == (True, True, 100)
    assert memory.held_bytes == 0


def test_error_releases_room() -> None:
    memory = DecodingMemory(100)
    with pytest.raises(MemoryError), memory.room(60, always):
        raise MemoryError
    assert memory.held_bytes == 0


def test_thread_without_room_waits_for_it() -> None:
    memory = DecodingMemory(100)
    with holders(memory) as group:
        first, second = group.add(60), group.add(41)
        assert (first.has_room, second.has_room, memory.held_bytes) == (True, None, 60)
        first.leave()
        eventually(lambda: second.has_room is True)


def test_small_request_does_not_overtake_large_request() -> None:
    memory = DecodingMemory(100)
    with holders(memory) as group:
        first, large, small = group.add(60), group.add(90), group.add(5)
        assert (large.has_room, small.has_room, memory.held_bytes) == (None, None, 60)
        first.leave()
        eventually(lambda: memory.held_bytes == 95)  # both get room at once
        assert (large.has_room, small.has_room) == (True, True)


def test_single_request_may_exceed_the_limit() -> None:
    memory = DecodingMemory(100)
    with holders(memory) as group:
        first = group.add(1)
        huge, other = group.add(1000), group.add(1)
        assert (huge.has_room, other.has_room) == (None, None)
        first.leave()
        eventually(lambda: huge.has_room is True)
        assert other.has_room is None
        huge.leave()
        eventually(lambda: other.has_room is True)


def test_unwanted_request_leaves_and_the_next_gets_its_room() -> None:
    memory = DecodingMemory(100)
    with holders(memory) as group:
        first, gone, last = group.add(60), group.add(90), group.add(40)
        memory.look_again()
        assert (gone.has_room, last.has_room) == (None, None)
        gone.is_wanted = False
        memory.look_again()
        eventually(lambda: gone.has_room is False)
        eventually(lambda: last.has_room is True)
        assert (first.has_room, memory.held_bytes) == (True, 100)


def test_unwanted_request_in_the_middle_does_not_change_the_order() -> None:
    memory = DecodingMemory(100)
    with holders(memory) as group:
        first, second, gone, last = [group.add(100) for _ in range(4)]
        gone.is_wanted = False
        first.leave()
        eventually(lambda: second.has_room is True and gone.has_room is False)
        assert last.has_room is None
        second.leave()
        eventually(lambda: last.has_room is True)


def test_error_while_waiting_removes_the_request() -> None:
    def fail() -> bool:
        raise ValueError

    memory = DecodingMemory(100)
    with memory.room(100, always):
        with pytest.raises(ValueError), memory.room(1, fail):
            pass
        assert (memory.num_waiting, memory.held_bytes) == (0, 100)


def test_many_threads_keep_the_limit_and_all_finish() -> None:
    memory = DecodingMemory(100)
    lock, is_over = threading.Lock(), threading.Event()
    held: list[int] = []
    sums: list[int] = []

    def work(seed: int) -> int:
        rng = random.Random(seed)
        num_served = 0
        for _ in range(100):
            num_bytes = rng.choice((1, 10, 30, 70, 100, 300))
            with memory.room(num_bytes, lambda: not is_over.is_set() and rng.random() < 0.9) as has_room:
                if has_room:
                    with lock:
                        held.append(num_bytes)
                        sums.append(sum(held) if len(held) > 1 else 0)
                    time.sleep(1e-4)
                    with lock:
                        held.remove(num_bytes)
                    num_served += 1
        return num_served

    with ThreadPoolExecutor(8) as executor:
        try:
            served = list(executor.map(work, range(8), timeout=10))
        finally:
            is_over.set()  # for threads that would wait forever
            memory.look_again()
    assert min(served) > 0
    assert 0 < max(sums) <= 100
    assert (memory.held_bytes, memory.num_waiting) == (0, 0)

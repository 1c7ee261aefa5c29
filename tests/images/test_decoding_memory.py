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
    """A thread that wants room, and holds it until it is told to leave."""

    def __init__(self, memory: DecodingMemory, num_bytes: int) -> None:
        self._memory = memory
        self._num_bytes = num_bytes
        self.is_wanted = True
        self.has_room: bool | None = None  # None: it waits
        self._may_leave = threading.Event()

    def run(self) -> None:
        with self._memory.room(self._num_bytes, lambda: self.is_wanted) as self.has_room:
            if self.has_room:
                assert self._may_leave.wait(10)

    def leave(self) -> None:
        self._may_leave.set()


class Holders:
    """Each comes once the one before it has room or waits."""

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
    """All of them leave in the end, and nothing is held any more."""
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
def test_api_servers_divide_it_and_each_has_room_for_the_largest_image(
    num_servers: int, largest_bytes: int, max_bytes: int
) -> None:
    assert DecodingMemory.share(num_servers, largest_bytes).max_bytes == max_bytes


def test_room_is_held_until_the_block_ends() -> None:
    memory = DecodingMemory(100)
    with memory.room(60, always) as first, memory.room(40, always) as second:
        assert (first, second, memory.held_bytes) == (True, True, 100)
    assert memory.held_bytes == 0


def test_an_error_gives_room_back() -> None:
    memory = DecodingMemory(100)
    with pytest.raises(MemoryError), memory.room(60, always):
        raise MemoryError
    assert memory.held_bytes == 0


def test_who_finds_no_room_waits_until_there_is_some() -> None:
    memory = DecodingMemory(100)
    with holders(memory) as group:
        first, second = group.add(60), group.add(41)
        assert (first.has_room, second.has_room, memory.held_bytes) == (True, None, 60)
        first.leave()
        eventually(lambda: second.has_room is True)


def test_a_small_one_does_not_overtake_a_large_one() -> None:
    memory = DecodingMemory(100)
    with holders(memory) as group:
        first, large, small = group.add(60), group.add(90), group.add(5)
        assert (large.has_room, small.has_room, memory.held_bytes) == (None, None, 60)
        first.leave()
        eventually(lambda: memory.held_bytes == 95)  # one look lets both in
        assert (large.has_room, small.has_room) == (True, True)


def test_one_alone_gets_more_than_there_is() -> None:
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


def test_who_is_wanted_no_more_leaves_and_lets_the_next_one_in() -> None:
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


def test_one_that_is_not_next_leaves_the_order_as_it_is() -> None:
    memory = DecodingMemory(100)
    with holders(memory) as group:
        first, second, gone, last = [group.add(100) for _ in range(4)]
        gone.is_wanted = False
        first.leave()
        eventually(lambda: second.has_room is True and gone.has_room is False)
        assert last.has_room is None
        second.leave()
        eventually(lambda: last.has_room is True)


def test_an_error_while_waiting_leaves_no_turn_behind() -> None:
    def fail() -> bool:
        raise ValueError

    memory = DecodingMemory(100)
    with memory.room(100, always):
        with pytest.raises(ValueError), memory.room(1, fail):
            pass
        assert (memory.num_waiting, memory.held_bytes) == (0, 100)


def test_many_threads_never_hold_more_than_there_is_and_all_come_to_an_end() -> None:
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
            is_over.set()  # for threads that would wait for ever
            memory.look_again()
    assert min(served) > 0
    assert 0 < max(sums) <= 100
    assert (memory.held_bytes, memory.num_waiting) == (0, 0)

"""Numbers that processes share in memory: tallies of limits, counts of connections, idle devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from service.processes.wire.memory import SharedMemory

_NUM_TALLIES, _ITEM_BYTES = 4, 8
_STUCK_MS = 1000


class SharedTally:
    """One number for each process. Each process writes only its own, without a lock.

    If several processes read the total and then add to it at the same time, it may exceed a limit by the sum
    of what they add.
    """

    def __init__(self, memory: SharedMemory, index: int, process: int, num_processes: int) -> None:
        start = index * num_processes
        self._numbers = memory.buffer.cast("q")[start : start + num_processes]
        self._process = process

    @property
    def own(self) -> int:
        """The number of this process."""
        return self._numbers[self._process]

    @own.setter
    def own(self, value: int) -> None:
        self._numbers[self._process] = value

    @property
    def total(self) -> int:
        """The sum over all processes."""
        return sum(self._numbers)

    @property
    def others(self) -> list[int]:
        """The numbers of the other processes."""
        numbers = self._numbers.tolist()
        return numbers[: self._process] + numbers[self._process + 1 :]


class SharedCounts:
    """How many connections each process has. A process that has not written for 1 s is stuck."""

    def __init__(
        self,
        numbers: SharedTally,
        written_at: SharedTally,  # milliseconds; 0 for a process that accepts no connections
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._numbers = numbers
        self._written_at = written_at
        self._clock = clock

    @property
    def own(self) -> int:
        """The number of this process."""
        return self._numbers.own

    @own.setter
    def own(self, value: int) -> None:
        self._numbers.own = value
        self._written_at.own = self._now_ms

    @property
    def others(self) -> list[int]:
        """The numbers of the other processes that accept connections and are not stuck."""
        since = max(1, self._now_ms - _STUCK_MS)
        pairs = zip(self._numbers.others, self._written_at.others, strict=True)
        return [number for number, written_at in pairs if written_at >= since]

    def leave(self) -> None:
        """This process accepts no more connections."""
        self._written_at.own = 0

    @property
    def _now_ms(self) -> int:
        return int(1000 * self._clock())


class SharedTallies(NamedTuple):
    """All tallies, for one process."""

    reserved_tokens: SharedTally
    held_bytes: SharedTally
    connections: SharedCounts

    @classmethod
    def of(cls, memory: SharedMemory, process: int, num_processes: int) -> SharedTallies:
        """The tallies in that memory, of the process with that number."""
        tokens, held, connections, written_at = (
            SharedTally(memory, index, process, num_processes) for index in range(_NUM_TALLIES)
        )
        return cls(tokens, held, SharedCounts(connections, written_at))

    @classmethod
    def of_file(cls, file: int, process: int, num_processes: int) -> SharedTallies:
        """The tallies in the memory of another process. Takes the file over."""
        memory = SharedMemory(file, _size(num_processes))
        memory.close_file()
        return cls.of(memory, process, num_processes)


class SharedIdleness:
    """Which devices are idle: one byte for each device, which only its process writes."""

    def __init__(self, memory: SharedMemory, index: int) -> None:
        self._idle = memory.buffer
        self._index = index
        self._is_retired = False

    def set(self, is_idle: bool) -> None:
        """Says whether this device could take work now."""
        self._idle[self._index] = is_idle and not self._is_retired

    def retire(self) -> None:
        """This device takes no work any more."""
        self._is_retired = True
        self.set(False)

    def count_others(self) -> int:
        """Returns how many other devices are idle."""
        return sum(self._idle) - self._idle[self._index]


def tallies_memory(num_processes: int) -> SharedMemory:
    """Creates memory for all tallies, each 0."""
    return SharedMemory.create(_size(num_processes))


def _size(num_processes: int) -> int:
    return _NUM_TALLIES * num_processes * _ITEM_BYTES

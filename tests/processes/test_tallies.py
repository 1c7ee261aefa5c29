"""Numbers that several processes share."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from service.errors import TooManyRequests
from service.intake.byte_budget import ByteBudget
from service.processes.wire.memory import SharedMemory
from service.processes.wire.tallies import (
    SharedCounts,
    SharedIdleness,
    SharedTallies,
    SharedTally,
    tallies_memory,
)
from service.queue.batcher import Batcher
from service.queue.queue_records import QueueLimits
from service.queue.tally import OwnTally
from tests.support.project import ROOT
from tests.support.queueing import Callers


@pytest.fixture
def processes() -> list[SharedTallies]:
    """The tallies of three processes: reserved tokens and held bytes of each."""
    memory = tallies_memory(3)
    found = [SharedTallies.of_file(os.dup(memory.file), process, 3) for process in range(3)]
    memory.close_file()
    return found


def test_process_changes_its_own_number_and_sees_the_sum(processes: list[SharedTallies]) -> None:
    assert [tally.total for tallies in processes for tally in tallies[:2]] == [0] * 6
    (tokens0, bytes0, _), (tokens1, bytes1, _), (tokens2, bytes2, _) = processes
    tokens0.own += 5
    tokens1.own = 2**40
    tokens2.own += 7
    tokens0.own -= 4
    bytes2.own = 100
    assert [tally.own for tally in (tokens0, tokens1, tokens2)] == [1, 2**40, 7]
    assert {tally.total for tally in (tokens0, tokens1, tokens2)} == {2**40 + 8}
    assert [tally.own for tally in (bytes0, bytes1, bytes2)] == [0, 0, 100]
    assert {tally.total for tally in (bytes0, bytes1, bytes2)} == {100}
    assert [tally.others for tally in (tokens0, tokens1, tokens2)] == [[2**40, 7], [1, 7], [1, 2**40]]


def test_number_of_a_single_process_is_the_sum() -> None:
    tally = OwnTally()
    assert (tally.own, tally.total) == (0, 0)
    tally.own += 3
    assert (tally.own, tally.total) == (3, 3)


def test_processes_see_the_numbers_of_each_other() -> None:
    memory = tallies_memory(2)
    tokens, *_ = SharedTallies.of_file(os.dup(memory.file), 0, 2)
    tokens.own = 11
    script = (
        "import sys; from service.processes.wire.tallies import SharedTallies\n"
        "tokens, held, _ = SharedTallies.of_file(int(sys.argv[1]), 1, 2)\n"
        "held.own = 4; tokens.own += tokens.total"
    )
    command = [sys.executable, "-c", script, str(memory.file)]
    subprocess.run(command, cwd=ROOT, pass_fds=[memory.file], check=True, timeout=60)
    _, held, _ = SharedTallies.of_file(memory.file, 0, 2)
    assert (tokens.own, tokens.total) == (11, 22)
    assert (held.own, held.total) == (0, 4)


def test_bytes_of_all_processes_count_against_the_limit(processes: list[SharedTallies]) -> None:
    ours, others = (ByteBudget(100, held) for _, held, _ in processes[:2])
    with others.permit(70) as permit:
        permit.add(70)
        with ours.permit(30) as own:
            own.add(30)
            assert (ours.held_bytes, others.held_bytes) == (30, 70)
            with pytest.raises(TooManyRequests):
                own.add(1)
            with pytest.raises(TooManyRequests):
                others.check(1)
    assert (ours.held_bytes, ours.held.total) == (0, 0)


def test_tokens_of_all_processes_count_against_the_limit(
    processes: list[SharedTallies], callers: Callers
) -> None:
    queues = [
        Batcher(QueueLimits(10, 100), observe=lambda stats: None, on_lost=lambda error: None, reserved=tokens)
        for tokens, _, _ in processes[:2]
    ]
    for queue in queues:
        queue.add_device("a")
    ours, others = queues
    first, second = callers.ticket(), callers.ticket()
    others.reserve(first, 60)
    with pytest.raises(TooManyRequests):
        ours.reserve(callers.ticket(), 41)
    ours.check_room()
    ours.reserve(second, 40)
    for queue in queues:
        with pytest.raises(TooManyRequests):
            queue.check_room()
    assert (ours.reserved_tokens, others.reserved_tokens) == (40, 60)
    others.cancel(first)
    ours.check_room()
    ours.cancel(second)
    assert processes[2][0].total == 0


def test_devices_count_idle_others_until_they_retire() -> None:
    memory = SharedMemory.create(3)
    devices = [SharedIdleness(memory, index) for index in range(3)]
    memory.close_file()
    assert [device.count_others() for device in devices] == [0, 0, 0]
    for device in devices[:2]:
        device.set(True)
    assert [device.count_others() for device in devices] == [1, 1, 2]
    devices[0].set(False)
    assert [device.count_others() for device in devices] == [1, 0, 1]
    devices[1].retire()
    devices[1].set(True)
    assert [device.count_others() for device in devices] == [0, 0, 0]


def test_process_that_has_not_written_its_connections_for_a_second_is_left_out() -> None:
    memory = tallies_memory(3)
    now = 100.0
    counts = [
        SharedCounts(
            SharedTally(memory, 0, process, 3), SharedTally(memory, 1, process, 3), clock=lambda: now
        )
        for process in range(3)
    ]
    memory.close_file()
    assert counts[0].others == []  # none has started
    for number, process in enumerate(counts):
        process.own = number
    assert [process.others for process in counts] == [[1, 2], [0, 2], [0, 1]]
    now += 0.6
    counts[0].own = 7
    counts[1].own = 1
    assert counts[0].others == [1, 2]
    now += 0.6
    assert [process.others for process in counts] == [[1], [7], [7, 1]]
    counts[1].leave()
    assert [process.others for process in counts] == [[], [7], [7]]
    counts[2].own = 5
    assert [process.own for process in counts] == [7, 1, 5]
    assert counts[0].others == [5]

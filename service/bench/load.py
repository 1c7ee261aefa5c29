"""One load process of `bench serve`: sends requests and notes when each was due, sent and answered.

Open loop: Poisson arrivals, whatever the server does. Closed loop: callers that each wait for their answer.
Knows nothing of what the requests hold nor of how notes are summed up, and imports little, so that a process
starts at once.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import threading
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import uvloop

from service.bench.http_client import Client, SendError
from service.config.files import allow_many_files

_PAUSE_S = 0.02  # of a caller that got no answer, so that a server that is gone is not asked in a tight loop


@dataclass(frozen=True)
class Share:
    """What one process sends: either at a rate (open loop) or from a number of callers (closed loop)."""

    host: str  # an address; names were resolved
    port: int
    requests: Path  # a file of requests
    spans: tuple[tuple[int, int], ...]  # where each begins and ends in it; they are sent in turn
    rate: float | None  # requests a second
    concurrency: int  # used without a rate
    total_s: float
    timeout_s: float
    seed: str


@dataclass
class Notes:
    """What happened to each request. Times in seconds since the start that all processes agreed on."""

    due: array[float] = field(default_factory=lambda: array("d"))
    sent: array[float] = field(default_factory=lambda: array("d"))
    done: array[float] = field(default_factory=lambda: array("d"))
    outcome: array[int] = field(default_factory=lambda: array("H"))  # an index into `outcomes`
    outcomes: dict[tuple[int, str], int] = field(default_factory=dict)  # (status, code), or (0, SendError)
    unfinished: int = 0  # sent, with the answer still to come when the process was stopped

    def add(self, due: float, sent: float, done: float, status: int, code: str) -> None:
        self.due.append(due)
        self.sent.append(sent)
        self.done.append(done)
        self.outcome.append(self.outcomes.setdefault((status, code), len(self.outcomes)))


def work(share: Share, pipe: Pipe) -> None:
    """The process. Says that it is ready, gets the time to start, and returns its `Notes`.

    The time is of `time.monotonic`, which processes share. Anything more on the pipe, or its end, stops it.
    """
    allow_many_files()
    with share.requests.open("rb") as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    requests = [whole[start:stop] for start, stop in share.spans]
    pipe.send(None)
    try:
        begin = pipe.recv()
    except EOFError:
        return
    time.sleep(max(begin - time.monotonic(), 0))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        notes = runner.run(send_all(share, requests, begin, pipe.fileno()))
    os.set_blocking(pipe.fileno(), True)  # which the event loop had changed
    pipe.send(notes)


async def send_all(share: Share, requests: Iterable[memoryview], begin: float, stop_fd: int) -> Notes:
    """Sends for `total_s` since `begin`, waits for the answers, and returns what happened.

    Stops at once when `stop_fd` can be read.
    """
    client = Client(share.host, share.port, share.timeout_s)
    sender = Sender(client, requests, begin)
    sending = asyncio.ensure_future(
        send_open(sender, share.rate, share.total_s, share.seed)
        if share.rate is not None
        else send_closed(sender, share.concurrency, share.total_s)
    )
    loop = asyncio.get_running_loop()
    loop.add_reader(stop_fd, sending.cancel)
    await asyncio.wait([sending])
    loop.remove_reader(stop_fd)
    client.close()
    if not sending.cancelled():
        sending.result()  # raises what went wrong, if anything did
    return sender.notes


class Sender:
    """Sends single requests and notes what happened. `now` is the time since the agreed start."""

    def __init__(self, client: Client, requests: Iterable[memoryview], begin: float) -> None:
        self.notes = Notes()
        self._client = client
        self._requests = cycle(requests)
        self._begin = begin

    def now(self) -> float:
        return time.monotonic() - self._begin

    async def send(self, due: float) -> bool:
        """Sends the next request, and says whether there was an answer."""
        sent = self.now()
        self.notes.unfinished += 1
        try:
            answer = await self._client.send(next(self._requests))
            status, code = answer.status, answer.code
        except SendError as error:
            status, code = 0, str(error)
        self.notes.unfinished -= 1
        self.notes.add(due, sent, self.now(), status, code)
        return status > 0


async def send_closed(sender: Sender, concurrency: int, total_s: float) -> None:
    """Callers that send as soon as they have their answer, whatever it is."""

    async def call() -> None:
        while (due := sender.now()) < total_s:
            if not await sender.send(due):
                await asyncio.sleep(_PAUSE_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(call())


async def send_open(sender: Sender, rate: float, total_s: float, seed: str) -> None:
    """Requests when they are due, however many are still unanswered.

    A thread waits for the times, since timers of event loops have a resolution of 1 ms.
    """
    loop = asyncio.get_running_loop()
    stopped, all_sent = threading.Event(), asyncio.Event()

    def send(due: float) -> None:
        if not stopped.is_set():
            group.create_task(sender.send(due))

    def wait_and_send() -> None:
        for due in arrivals(rate, total_s, seed):
            if stopped.wait(max(due - sender.now(), 0)):
                return
            loop.call_soon_threadsafe(send, due)
        loop.call_soon_threadsafe(all_sent.set)

    clock = threading.Thread(target=wait_and_send)
    async with asyncio.TaskGroup() as group:
        clock.start()
        try:
            await all_sent.wait()
        finally:
            stopped.set()
            clock.join()


def arrivals(rate: float, total_s: float, seed: str) -> Iterator[float]:
    """Times of a Poisson process of `rate` a second, from 0 to `total_s`."""
    rng = random.Random(seed)
    due = rng.expovariate(rate)
    while due < total_s:
        yield due
        due += rng.expovariate(rate)

"""A load process of `bench serve`: sends requests and notes when each was due, sent and answered.

Open loop: Poisson arrivals, independent of the server. Closed loop: callers that each wait for their answer.
Knows nothing of the content of requests or of the report. Imports little, so that a process starts at once.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import NamedTuple

import uvloop

from service.bench.http_client import Client, SendError
from service.bench.token_reader import TokenReader
from service.config.files import allow_many_files

STAMP_BYTES = 24
_PAUSE_S = (
    0.02  # of a caller after a request without an answer, so that it does not spin if the server is gone
)
# The server would refuse the same request again.
_REFUSED = (400, 413, 415)


class Span(NamedTuple):
    """Where a request is in the file of requests, and where its stamps are."""

    start: int
    stop: int
    stamps: tuple[int, ...]  # starts, in order


@dataclass(frozen=True)
class Share:
    """The load of one process: requests at a rate (open loop) or from a number of callers (closed loop)."""

    host: str  # an IP address
    port: int
    requests: Path  # a file of requests
    spans: tuple[Span, ...]
    first: int  # number of the request that is sent first; the others follow in turn
    rate: float | None  # requests per second
    concurrency: int  # callers, if there is no rate
    total_s: float
    timeout_s: float
    seed: str
    run: str  # differs in each run and process, as all stamps do
    tokens_dir: str | None = None  # the folder in which the server keeps tokens, if they are read


@dataclass
class Notes:
    """Times and outcome of each request. Times are in seconds since the common start of all processes."""

    due: array[float] = field(default_factory=lambda: array("d"))
    sent: array[float] = field(default_factory=lambda: array("d"))
    done: array[float] = field(default_factory=lambda: array("d"))
    outcome: array[int] = field(default_factory=lambda: array("H"))  # an index into `outcomes`
    outcomes: dict[tuple[int, str], int] = field(default_factory=dict)  # (status, code), or (0, SendError)
    num_bytes: array[int] = field(default_factory=lambda: array("Q"))  # of tokens that were read
    missing: int = 0  # images whose tokens were not there
    unfinished: int = 0  # requests that were sent, but not yet answered when the process was stopped
    refused: dict[tuple[int, str], str] = field(
        default_factory=dict
    )  # (number of request, param): error code

    def add(self, due: float, sent: float, done: float, status: int, code: str, num_bytes: int = 0) -> None:
        self.num_bytes.append(num_bytes)
        self.due.append(due)
        self.sent.append(sent)
        self.done.append(done)
        self.outcome.append(self.outcomes.setdefault((status, code), len(self.outcomes)))


def work(share: Share, pipe: Pipe) -> None:
    """Runs a load process. Sends `None` when it is ready, receives the time to start, and sends its `Notes`.

    The time is of `time.monotonic`, which is the same in all processes. A second message or the end of the
    pipe stops the load.
    """
    allow_many_files()
    with share.requests.open("rb") as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    requests = [_pieces(whole, span) for span in share.spans]
    reader = None if share.tokens_dir is None else TokenReader(share.tokens_dir)
    pipe.send(None)
    try:
        begin = pipe.recv()
    except EOFError:
        return
    time.sleep(max(begin - time.monotonic(), 0))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        notes = runner.run(send_all(share, requests, begin, pipe.fileno(), reader))
    os.set_blocking(pipe.fileno(), True)  # the event loop has made it non-blocking
    pipe.send(notes)


def _pieces(whole: memoryview, span: Span) -> list[memoryview]:
    """The bytes of a request before, between and after its stamps."""
    starts = [span.start, *(stamp + STAMP_BYTES for stamp in span.stamps)]
    return [whole[start:stop] for start, stop in zip(starts, [*span.stamps, span.stop], strict=True)]


async def send_all(
    share: Share,
    requests: Sequence[Sequence[memoryview]],
    begin: float,
    stop_fd: int,
    reader: TokenReader | None = None,
) -> Notes:
    """Sends requests for `total_s` from `begin` on, waits for the answers, and returns the notes.

    Stops at once when `stop_fd` becomes readable.
    """
    client = Client(share.host, share.port, share.timeout_s, keeps_bodies=reader is not None)
    sender = Sender(client, requests, share, begin, reader)
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
        sending.result()  # raises the exception of `sending`, if it has one
    return sender.notes


class Sender:
    """Sends single requests in turn, and notes their times and outcomes.

    A request is done once its tokens are read, if there is a `reader`.
    """

    def __init__(
        self,
        client: Client,
        requests: Sequence[Sequence[memoryview]],
        share: Share,
        begin: float,
        reader: TokenReader | None,
    ) -> None:
        self.notes = Notes()
        self._client = client
        self._requests = islice(cycle(enumerate(requests)), share.first, None)
        self._run = share.run
        self._numbers = count()
        self._begin = begin
        self._reader = reader

    def now(self) -> float:
        """Seconds since the common start."""
        return time.monotonic() - self._begin

    async def send(self, due: float) -> bool:
        """Sends the next request. Returns whether it got an answer."""
        sent = self.now()
        number, pieces = next(self._requests)
        num_bytes = 0
        self.notes.unfinished += 1
        try:
            answer = await self._client.send(self._stamped(pieces))
            status, code = answer.status, answer.code
            if self._reader is not None and answer.body:
                num_bytes, missing = await self._reader.read(answer.body)
                self.notes.missing += missing
            if status in _REFUSED:
                self.notes.refused[number, answer.param] = code
        except SendError as error:
            status, code = 0, str(error)
        self.notes.unfinished -= 1
        self.notes.add(due, sent, self.now(), status, code, num_bytes)
        return status > 0

    def _stamped(self, pieces: Sequence[memoryview]) -> list[bytes | memoryview]:
        """The request with stamps that were never sent before between its pieces."""
        request: list[bytes | memoryview] = [pieces[0]]
        for piece in pieces[1:]:
            request += (f"{self._run}{next(self._numbers):0{STAMP_BYTES - len(self._run)}x}".encode(), piece)
        return request


async def send_closed(sender: Sender, concurrency: int, total_s: float) -> None:
    """Each caller sends its next request as soon as the last one has an answer, also after a refusal."""

    async def call() -> None:
        while (due := sender.now()) < total_s:
            if not await sender.send(due):
                await asyncio.sleep(_PAUSE_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(call())


async def send_open(sender: Sender, rate: float, total_s: float, seed: str) -> None:
    """Sends each request when it is due, even if many have no answer yet.

    A thread waits for the times, because timers of event loops have a resolution of 1 ms.
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
    """Times of a Poisson process with `rate` arrivals per second, from 0 to `total_s` seconds."""
    rng = random.Random(seed)
    due = rng.expovariate(rate)
    while due < total_s:
        yield due
        due += rng.expovariate(rate)

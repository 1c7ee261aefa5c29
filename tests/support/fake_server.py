"""A small HTTP server in a thread. The test chooses the bytes of each answer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

METRICS = """\
process_resident_memory_bytes 1000COUNT
vision_sidecar_device_busy_seconds_total{device="fake"} COUNT
"""


@dataclass(frozen=True)
class Reply:
    """The bytes of an answer. `closes` closes the connection after them."""

    data: bytes
    closes: bool = False


def reply(status: int, body: bytes = b"{}", *headers: str) -> Reply:
    lines = [f"HTTP/1.1 {status} x", f"content-length: {len(body)}", *headers, "", ""]
    return Reply("\r\n".join(lines).encode() + body, "connection: close" in headers)


def refusal(code: str, status: int = 429) -> Reply:
    return reply(status, b'{"error": {"code": "%s"}}' % code.encode())


CLOSED = Reply(b"", closes=True)
OK = reply(200)


@dataclass
class Seen:
    """The requests and connections that arrived."""

    posts: list[tuple[str, bytes]] = field(default_factory=list)  # head and body of each
    connections: int = 0


class FakeServer:
    """Answers POST number n, counted from 0, with `answer(n)`, and every GET with metrics of a fake device.

    At POST number `stall_at` the whole server hangs for `stall_s` seconds.
    """

    def __init__(
        self, answer: Callable[[int], Reply] = lambda n: OK, *, stall_at: int = -1, stall_s: float = 0.0
    ) -> None:
        self.seen = Seen()
        self.metrics = METRICS
        self._answer = answer
        self._stall_at, self._stall_s = stall_at, stall_s
        self._started = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _run(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0, limit=2**24)
        self.port: int = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stopped.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.seen.connections += 1
        try:
            while not (answer := await self._exchange(reader)).closes:
                writer.write(answer.data)
            writer.write(answer.data)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader) -> Reply:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET"):
            count = len(self.seen.posts)
            return reply(200, self.metrics.replace("COUNT", str(count)).encode())
        body = await reader.readexactly(int(head.partition("content-length: ")[2].split("\r\n")[0]))
        number = len(self.seen.posts)
        self.seen.posts.append((head, body))
        if number == self._stall_at:
            time.sleep(self._stall_s)  # noqa: ASYNC251 - blocks the event loop on purpose
        return self._answer(number)

"""A stand-in for an LLM server, in a thread. The test decides what it sends and when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Self

from tests.support.waiting import eventually


class Asked:
    """One request that arrived, and the connection to answer it on."""

    def __init__(self, head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        self.line, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
        self.headers = [(name.lower(), value.strip()) for name, _, value in (x.partition(":") for x in lines)]
        self.body = body
        self.has_left = threading.Event()  # the server in front has closed the connection
        self._writer = writer

    def header(self, name: str) -> list[str]:
        return [value for given, value in self.headers if given == name]

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def drain(self) -> None:
        """Waits until the other end has read enough."""
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()


Script = Callable[[Asked], Awaitable[None]]
OK = b'{"ok":true}'


def answer(status: int = 200, body: bytes = OK, *headers: str) -> Script:
    """Sends one whole answer."""

    async def script(asked: Asked) -> None:
        lines = [f"HTTP/1.1 {status} x", f"content-length: {len(body)}", *headers, "", ""]
        asked.write("\r\n".join(lines).encode() + body)

    return script


class LlmServer:
    """Answers each request by `script`. A body has a Content-Length."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or answer()
        self.refuses_bodies = False  # answers 413 at the head
        self.asked: list[Asked] = []
        self.num_connections = 0
        self._started = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def last(self) -> Asked:
        """The request that arrived last. Waits for the first."""
        eventually(lambda: bool(self.asked))
        return self.asked[-1]

    async def _run(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0, limit=2**16)
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
        self.num_connections += 1
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                asked = Asked(head, b"", writer)
                if self.refuses_bodies:
                    asked.write(b"HTTP/1.1 413 x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                    while await reader.read(2**20):
                        pass
                    break
                length = int((asked.header("content-length") or ["0"])[0])
                asked.body = await reader.readexactly(length)
                self.asked.append(asked)
                await self._answer(asked, reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, asked: Asked, reader: asyncio.StreamReader) -> None:
        """Runs the script, and notices a connection that is closed meanwhile."""
        leaving = asyncio.ensure_future(self._watch(asked, reader))
        try:
            await self.script(asked)
        finally:
            leaving.cancel()

    async def _watch(self, asked: Asked, reader: asyncio.StreamReader) -> None:
        while not reader.at_eof() and reader.exception() is None:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        asked.has_left.set()

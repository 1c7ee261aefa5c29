"""Where tests fetch from: a web server on loopback, a resolver and a dialler under their control."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from ipaddress import ip_address
from types import TracebackType
from typing import Self

import httpcore

from service.fetching.addresses import Address

Script = Callable[[asyncio.StreamWriter], Awaitable[None]]
HOST = "images.test"
PUBLIC = "93.184.215.14"


def answer(body: bytes = b"image", status: int = 200, **headers: str | None) -> bytes:
    """An answer that ends its connection; a header that is None is left out."""
    fields = {"content_length": str(len(body)), "connection": "close"} | headers
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items() if value is not None]
    return "\r\n".join([f"HTTP/1.1 {status} x", *lines, "", ""]).encode() + body


def redirect(location: str, status: int = 302) -> bytes:
    return answer(b"moved", status, location=location)


class Upstream:
    """A server that answers by path, 404 where it knows none. What it was asked is in `heads`."""

    def __init__(self, answers: Mapping[str, bytes | Script]) -> None:
        self.answers = answers
        self.heads: list[str] = []
        self.num_connections = 0
        self.num_open = 0
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()  # connections may still wait; they end with the event loop

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.num_open += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                script = self.answers.get(head.split(" ")[1], answer(status=404))
                if isinstance(script, bytes):
                    writer.write(script)
                else:
                    await script(writer)
                await writer.drain()
                if not isinstance(script, bytes) or b"connection: close" in script:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.num_open -= 1
            writer.close()


class Resolver:
    """Answers from a table; further look-ups of a host get further answers, at the end the last one."""

    def __init__(self, hosts: Mapping[str, Sequence[Sequence[str]]], default: Iterable[str] = ()) -> None:
        self._hosts = {host: list(answers) for host, answers in hosts.items()}
        self._default = list(default)
        self.asked: list[str] = []
        self.port: int | None = None  # in place of the one that was asked for

    async def __call__(self, host: str, port: int, /) -> Sequence[tuple[Address, int]]:
        self.asked.append(host)
        answers = self._hosts.get(host, [self._default])
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(ip_address(text), self.port or port) for text in found]


class Dialler(httpcore.AnyIOBackend):
    """Dials ports of this machine in place of addresses: of `servers`, and for all others of the canary."""

    def __init__(self, servers: Mapping[str, Upstream], canary: Upstream) -> None:
        self._servers = servers
        self._canary = canary
        self.dialled: list[tuple[str, int]] = []

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the signature is httpcore's
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self.dialled.append((host, port))
        where = self._servers.get(host, self._canary).port
        return await super().connect_tcp("127.0.0.1", where, timeout, local_address, socket_options)

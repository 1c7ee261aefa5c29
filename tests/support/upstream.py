"""What tests of fetching need: a web server on loopback, a resolver and a dialler under their control."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from ipaddress import ip_address
from types import TracebackType
from typing import Self

import httpcore

from service.config.hosts import Address

Script = Callable[[asyncio.StreamWriter], Awaitable[None]]
HOST = "images.test"
PUBLIC = "93.184.215.14"


def reply(body: bytes = b"image", status: int = 200, **headers: str | None) -> bytes:
    """A response after which the connection closes. A header that is None is left out."""
    fields = {"content_length": str(len(body)), "connection": "close"} | headers
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items() if value is not None]
    return "\r\n".join([f"HTTP/1.1 {status} x", *lines, "", ""]).encode() + body


def redirect(location: str, status: int = 302) -> bytes:
    """A response that redirects to `location`."""
    return reply(b"moved", status, location=location)


class Upstream:
    """A server with an answer for each path, and 404 for other paths. `heads` has the heads of requests."""

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
        self._server.close()  # open connections end with the event loop

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.num_open += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                script = self.answers.get(head.split(" ")[1], reply(status=404))
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
    """Looks hosts up in a table: each look-up returns the next answer for the host, at the end the last."""

    def __init__(self, hosts: Mapping[str, Sequence[Sequence[str]]], default: Iterable[str] = ()) -> None:
        self._hosts = {host: list(answers) for host, answers in hosts.items()}
        self._default = list(default)
        self.asked: list[str] = []
        self.port: int | None = None  # returned in place of the port in the look-up

    async def __call__(self, host: str, port: int, /) -> Sequence[tuple[Address, int]]:
        self.asked.append(host)
        answers = self._hosts.get(host, [self._default])
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(ip_address(text), self.port or port) for text in found]


class Dialler(httpcore.AnyIOBackend):
    """Connects to servers on this machine in place of addresses: to `servers`, else to the canary."""

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


REFUSED = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.100.100.200", "100.127.255.255",
    "127.0.0.1", "127.255.255.254", "168.63.129.16", "169.254.0.1", "169.254.169.254", "172.16.0.1",
    "172.31.255.255", "192.0.0.1", "192.0.0.9", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.1.1",
    "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.250",
    "240.0.0.1", "255.255.255.255",
    "::", "::1", "::7f00:1", "::127.0.0.1", "::8.8.8.8", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "::ffff:169.254.169.254", "::ffff:0:127.0.0.1", "64:ff9b::127.0.0.1", "64:ff9b::10.0.0.1",
    "64:ff9b:1::8.8.8.8", "100::1", "2001::1", "2001:0:7f00:1::", "2001:2::1", "2001:10::1", "2001:20::1",
    "2001:db8::1", "2002:7f00:1::", "2002:a00:1::1", "2002:808:808::", "3fff::1", "4000::1", "5f00::1",
    "fc00::1", "fd00:ec2::254", "fd20:ce::254", "fe80::1", "fe80::1%1", "fec0::1", "ff02::1", "ff0e::1",
]  # fmt: skip

"""Connects to checked addresses only: it looks a host up, checks its addresses and dials one of those.

A check before the request would be useless, because a second look-up may return another address. The layers
above do TLS and write the Host header, both with the name of the host. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import ip_address
from typing import Protocol

import httpcore

from service.config.hosts import Address, Network
from service.fetching.addresses import is_allowed

_MAX_LOOK_UPS_AT_ONCE = 16


class AddressRefused(Exception):
    """The host has an address that images may not be fetched from. No connection was made."""


class Resolve(Protocol):
    """Looks a host up. Raises `OSError` if it has no address."""

    async def __call__(self, host: str, port: int, /) -> Sequence[tuple[Address, int]]: ...


class SystemResolver:
    """Looks hosts up as the system does, in threads of its own.

    A look-up may take half a minute and cannot be cancelled. In the threads of the event loop, a few of them
    would hold up everything else that runs there, such as `/metrics`.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_MAX_LOOK_UPS_AT_ONCE, thread_name_prefix="look-up")

    async def __call__(self, host: str, port: int, /) -> Sequence[tuple[Address, int]]:
        """The addresses of a host, each with the port, in the order of the system's resolver."""
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        return [(ip_address(where[0]), port) for *_, where in found]


class CheckingBackend(httpcore.AsyncNetworkBackend):
    """Dials through `dialler`, to which it gives addresses that are public or in `networks`, never names."""

    def __init__(
        self, resolve: Resolve, networks: Sequence[Network], dialler: httpcore.AsyncNetworkBackend
    ) -> None:
        self._resolve = resolve
        self._networks = networks
        self._dialler = dialler

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the signature is httpcore's
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Tries the addresses of a host in turn, each for an equal share of `timeout`.

        Raises `AddressRefused` if any address of the host is not allowed, else the errors of httpcore.
        """
        addresses = await self._look_up(host, port)
        if not all(is_allowed(address, self._networks) for address, _ in addresses):
            raise AddressRefused
        failure: Exception = httpcore.ConnectError("the host has no address")
        for address, address_port in addresses:
            share = None if timeout is None else timeout / len(addresses)
            try:
                return await self._dialler.connect_tcp(
                    str(address), address_port, share, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def _look_up(self, host: str, port: int) -> Sequence[tuple[Address, int]]:
        try:
            return await self._resolve(host, port)
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from None

"""Accepts connections on a listening socket that several processes may share.

A waiting connection wakes every process that shares the socket. The process with the fewest connections
accepts it; the others leave the socket alone for a moment. If the process with the fewest connections is busy
or stuck and does not accept it in that time, another process does.

Knows sockets; knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import select
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

logger = logging.getLogger(__name__)

_LOOK_S = 0.001  # between two looks at whether another process has accepted
_PATIENCE_S = 0.01  # with processes that have fewer connections
_FULL_PAUSE_S = 0.05  # for a process with as many connections as it may have
_NO_FILES_PAUSE_S = 1.0
_HANDSHAKE_S = 0.1  # for handshakes that have begun when the socket is to be closed

_SO_ATTACH_FILTER = 26  # Linux; `socket` does not name it
# A program of the classic Berkeley packet filter: drops segments with the flag SYN (0x02 in byte 13).
_DROP_SYN = ((0x30, 0, 0, 13), (0x45, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))


class ConnectionCounts(Protocol):
    """How many connections this process has, which it writes regularly, and how many others have."""

    own: int

    @property
    def others(self) -> Sequence[int]:
        """The numbers of the other processes that accept connections. A process that is stuck is left out."""

    def leave(self) -> None:
        """This process accepts no more connections."""


class OwnCount:
    """The count of a process that serves alone."""

    own = 0
    others: Sequence[int] = ()

    def leave(self) -> None: ...


class Acceptor:
    """Accepts on the event loop that creates it, and calls `make_protocol` for each connection.

    `num_connections` returns how many connections this process has open; it shall have at most
    `max_connections`. `counts` are those of all processes that share the listener.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        num_connections: Callable[[], int],
        counts: ConnectionCounts,
        max_connections: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make_protocol = make_protocol
        self._num_connections = num_connections
        self._counts = counts
        self._max_connections = max_connections
        self._opening: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_leaving = False
        listener.setblocking(False)
        # Readable after each arrival until it is polled, whereas the listener is readable while a connection
        # waits. Only Linux has it, and several processes need Linux.
        self._arrivals = select.epoll() if hasattr(select, "epoll") else None
        if self._arrivals is not None:
            self._arrivals.register(listener, select.EPOLLIN | select.EPOLLET)
        self._watched = listener.fileno() if self._arrivals is None else self._arrivals.fileno()
        self.count()
        self._resume()

    async def stop(self) -> None:
        """Accepts no more, and closes the listener.

        If no other process accepts any more, this one first accepts all connections that wait, even beyond
        `max_connections`: the kernel resets connections that wait when the listener is closed.
        """
        self._is_leaving = True
        self._counts.leave()
        if not self._counts.others:
            ignore_new_clients(self._listener)
            self._resume()
            await asyncio.sleep(_HANDSHAKE_S)
            self._accept_in_turn()
        self._pause()
        if self._arrivals is not None:
            self._arrivals.close()
        self._listener.close()
        if self._opening:
            await asyncio.wait(self._opening)

    def count(self) -> None:
        """Lets the other processes know how many connections this one has. To be called regularly."""
        if not self._is_leaving:
            self._counts.own = self._num_connections() + len(self._opening)

    def _resume(self) -> None:
        self._pause()
        self._loop.add_reader(self._watched, self._on_arrival)
        self._accept_in_turn()

    def _pause(self) -> None:
        self._stop_looking()
        self._loop.remove_reader(self._watched)

    def _stop_looking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _resume_later(self, seconds: float) -> None:
        self._pause()
        self._timer = self._loop.call_later(seconds, self._resume)

    def _on_arrival(self) -> None:
        if self._arrivals is not None:
            self._arrivals.poll(0)
        if self._timer is None or self._has_fewest():
            self._stop_looking()
            self._accept_in_turn()

    def _accept_in_turn(self) -> None:
        """Accepts waiting connections while this process has the fewest, then lets others accept."""
        while self._has_room():
            if not self._has_fewest():
                self._look_later(self._loop.time() + _PATIENCE_S, self._counts.others)
                return
            if not self._accept():
                return

    def _has_room(self) -> bool:
        self.count()
        if self._is_leaving or self._counts.own < self._max_connections:
            return True
        self._resume_later(_FULL_PAUSE_S)
        return False

    def _has_fewest(self) -> bool:
        num_own = self._counts.own
        return self._is_leaving or num_own <= min(self._counts.others, default=num_own)

    def _look_later(self, until: float, before: Sequence[int]) -> None:
        self._timer = self._loop.call_later(_LOOK_S, self._look, until, before)

    def _look(self, until: float, before: Sequence[int]) -> None:
        """Accepts a connection out of turn once the others have accepted none until then."""
        self._timer = None
        if not self._is_one_waiting():
            return
        if self._counts.others != before or self._has_fewest():
            self._accept_in_turn()
        elif self._loop.time() < until:
            self._look_later(until, before)
        elif self._has_room() and self._accept():
            self._accept_in_turn()

    def _is_one_waiting(self) -> bool:
        poll = select.poll()  # `select` takes no file above 1023
        poll.register(self._listener, select.POLLIN)
        return bool(poll.poll(0))

    def _accept(self) -> bool:
        """Returns whether more connections may wait."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return False
        except ConnectionAbortedError:
            return True
        except OSError as error:
            logger.error("cannot accept connections: %s", error.strerror)
            self._resume_later(_NO_FILES_PAUSE_S)
            return False
        opening = self._loop.create_task(self._open(connection))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        return True

    async def _open(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:
            connection.close()  # the client is gone


def ignore_new_clients(listener: socket.socket) -> None:
    """Makes the kernel drop the first segment of new connections, in all processes that share the socket.

    A handshake that has begun is completed. A client that is ignored sends again after a second, and is
    refused if the socket is closed by then. Does nothing on a system without such a filter.
    """
    if sys.platform != "linux":
        return
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in _DROP_SYN)
    buffer = ctypes.create_string_buffer(program, len(program))
    with suppress(OSError):
        listener.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(_DROP_SYN), ctypes.addressof(buffer))
        )

"""Accepts connections and hands them out to the API servers in turn.

Connections for which none has room wait, and all others in the listener's backlog behind them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Sequence

from service.processes.supervisor.members import ServerMember

logger = logging.getLogger(__name__)

_ACCEPTED_AT_ONCE = 64
_NO_FILES_PAUSE_S = 1.0
_NO_ROOM_PAUSE_S = 0.05  # where all are full
_BEHIND_PAUSE_S = 0.002  # where one has only not taken yet what was handed to it


class Reception:
    """Runs on the event loop that makes it."""

    def __init__(self, listener: socket.socket, members: Sequence[ServerMember]) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._members = members
        self._next = 0  # member to get a connection
        self._waiting: deque[socket.socket] = deque()  # for room
        self._is_paused = False
        listener.setblocking(False)
        self._open()

    def close_if_alone(self) -> None:
        """Ends it once no API server takes connections any more."""
        if self._listener.fileno() >= 0 and not any(member.takes_connections for member in self._members):
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            while self._waiting:
                self._waiting.pop().close()

    def take_back(self, connection: socket.socket) -> None:
        """One that an API server had no room for."""
        if self._listener.fileno() < 0:
            connection.close()
        elif not self._hand_out(connection):
            self._wait(connection)

    def _open(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.error("cannot accept connections: %s", error.strerror)
                self._pause(_NO_FILES_PAUSE_S)
                return
            if not self._hand_out(connection):
                self._wait(connection)
                return

    def _wait(self, connection: socket.socket) -> None:
        self._waiting.append(connection)
        self._pause(self._pause_s)

    @property
    def _pause_s(self) -> float:
        has_room = any(member.takes_connections and not member.is_full for member in self._members)
        return _BEHIND_PAUSE_S if has_room else _NO_ROOM_PAUSE_S

    def _pause(self, seconds: float) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._is_paused = False
        if self._listener.fileno() < 0:
            return
        while self._waiting:
            if not self._hand_out(self._waiting[0]):
                self._pause(self._pause_s)
                return
            self._waiting.popleft()
        self._open()

    def _hand_out(self, connection: socket.socket) -> bool:
        """To the next API server with room for it, first of those that answer."""
        turn = [self._members[(self._next + n) % len(self._members)] for n in range(len(self._members))]
        for member in sorted(turn, key=lambda member: not member.is_responsive):
            if member.hand_over(connection):
                self._next = self._members.index(member) + 1
                connection.close()
                return True
        return False

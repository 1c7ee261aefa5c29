"""The API servers as the supervisor sees them: processes with a line to each."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.api_servers.dispatcher import ServerLines
from service.api_servers.link import Link
from service.api_servers.memory import SharedMemory
from service.api_servers.messages import STOP_SIGNALS, Setup

_COMMAND = "import sys; sys.path[:] = {path!r}; from service.api_servers.member import main; main({file})"
_RESPONSIVE_S = 2.0
_CONNECTIONS_BYTES = 2**12  # about ten


@dataclass(eq=False)
class Member:
    """One API server."""

    index: int
    process: subprocess.Popen[bytes]
    line: Link
    connections: Link
    clients: Mapping[str, ServerLines]  # its lines to the devices, by their names
    is_up: bool = False
    takes_connections: bool = True
    is_full: bool = False
    is_running: bool = True
    pinged_at: float | None = None  # while it has not answered

    @classmethod
    def start(cls, setup: Setup, tallies: SharedMemory) -> Member:
        """Starts the process. Raises `OSError`."""
        line, their_line = Link.pair()
        connections, their_connections = Link.pair()
        # Room for few at a time: those on their way cannot be had by another one.
        connections.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CONNECTIONS_BYTES)
        clients = {}
        ends = [their_connections]
        files = [their_connections.fileno(), tallies.file]
        for device in setup.devices:
            (batches, their_batches), (results, their_results) = Link.pair(), Link.pair()
            clients[device] = ServerLines(batches, results)
            ends += [their_batches, their_results]
            files += [their_batches.fileno(), their_results.fileno()]
        process = _spawn(their_line)
        line.send(setup, files)
        for end in (*ends, their_line):
            end.socket.close()
        for link in (line, connections):
            link.socket.setblocking(False)
        return cls(setup.index, process, line, connections, clients)

    def tell(self, message: object, files: Sequence[int] = ()) -> None:
        """Raises `OSError` where it does not listen."""
        self.line.send(message, files)

    def hand_over(self, connection: socket.socket) -> bool:
        """Gives it a connection; says whether it had room for one."""
        if self.is_full or not self.takes_connections:
            return False
        try:
            self.connections.send(None, [connection.fileno()])
        except OSError:
            return False  # it is behind, or gone
        return True

    def stop_connections(self) -> None:
        """Hands over no more, and says so by closing the line."""
        if self.takes_connections:
            self.takes_connections = False
            self.connections.close()

    @property
    def silent_s(self) -> float:
        """For how long it has not answered."""
        return 0.0 if self.pinged_at is None else time.monotonic() - self.pinged_at

    @property
    def is_responsive(self) -> bool:
        """Whether it answers at once, as far as that is known."""
        return self.silent_s < _RESPONSIVE_S


def _spawn(line: Link) -> subprocess.Popen[bytes]:
    """With signals held back, as one to all processes of a group may come before it has its handlers."""
    command = _COMMAND.format(path=sys.path, file=line.fileno())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return subprocess.Popen(
            [sys.executable, "-c", command], stdin=subprocess.DEVNULL, pass_fds=[line.fileno()]
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

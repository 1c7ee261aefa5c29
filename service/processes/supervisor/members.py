"""The other processes as the supervisor sees them, with a link to each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from models import ModelError
from service.processes.wire.link import Link
from service.processes.wire.memory import SharedMemory
from service.processes.wire.messages import STOP_SIGNALS, DeviceLoaded, DeviceSetup, Fault, Setup

_COMMAND = "import sys; sys.path[:] = {path!r}; from {module} import main; main({file})"


class Process(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int: ...

    def wait(self) -> int:
        """Waits for the exit. Returns the exit code; for a signal, the negative number."""

    def kill(self) -> None: ...


# Starts a process that calls `main` of a module with one end of a link. Raises `OSError`.
Spawn = Callable[[str, Link], Process]


def spawn(module: str, link: Link) -> subprocess.Popen[bytes]:
    """Starts the process with signals blocked.

    A signal to the whole process group may come before the process has its handlers.
    """
    command = _COMMAND.format(path=sys.path, module=module, file=link.fileno())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return subprocess.Popen(
            [sys.executable, "-c", command], stdin=subprocess.DEVNULL, pass_fds=[link.fileno()]
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(eq=False, kw_only=True)
class Member:
    """One process that the supervisor has started."""

    name: str  # in the log
    process: Process
    link: Link
    is_up: bool = False
    is_running: bool = True
    pinged_at: float | None = None  # of a ping without an answer; time.monotonic()

    def tell(self, message: object, files: Sequence[int] = ()) -> None:
        """Sends a message. Raises `OSError` if the process cannot receive it."""
        self.link.send(message, files)

    @property
    def silent_s(self) -> float:
        """The time since a ping without an answer; else 0."""
        return 0.0 if self.pinged_at is None else time.monotonic() - self.pinged_at


@dataclass(eq=False, kw_only=True)
class ServerMember(Member):
    """An API server."""

    index: int
    device_ends: dict[str, tuple[Link, Link]]  # of its lines to each device, for batches and for results

    @classmethod
    def start(cls, setup: Setup, listener: socket.socket, tallies: SharedMemory) -> ServerMember:
        """Starts the process. Raises `OSError`."""
        device_ends = {}
        ends: list[Link] = []
        files = [listener.fileno(), tallies.file]
        for device in setup.devices:
            (batches, their_batches), (results, their_results) = Link.pair(), Link.pair()
            device_ends[device] = batches, results
            ends += [their_batches, their_results]
            files += [their_batches.fileno(), their_results.fileno()]
        process, link = _start(spawn, "service.processes.api_server.api_server", setup, files)
        for end in ends:
            end.socket.close()
        return cls(
            name=f"API server {setup.index}",
            process=process,
            link=link,
            index=setup.index,
            device_ends=device_ends,
        )


@dataclass(eq=False, kw_only=True)
class DeviceMember(Member):
    """The process of a device."""

    device: str
    loaded: DeviceLoaded | None = None
    memories: list[int] = field(default_factory=list)  # files, for the API servers in turn

    @classmethod
    def start(
        cls, setup: DeviceSetup, idleness: SharedMemory, servers: Sequence[ServerMember], spawn: Spawn
    ) -> DeviceMember:
        """Starts the process, and gives it the ends of the API servers' lines. Raises `OSError`."""
        ends = [end for server in servers for end in server.device_ends.pop(setup.device)]
        try:
            files = [idleness.file, *(end.fileno() for end in ends)]
            process, link = _start(spawn, "service.processes.device.device_process", setup, files)
        finally:
            for end in ends:
                end.socket.close()
        return cls(name=f"the process of {setup.device}", process=process, link=link, device=setup.device)

    def take_loaded(self, loaded: DeviceLoaded, files: Sequence[int], num_servers: int) -> None:
        """Keeps the message and its files. Files are missing if this process may open no more."""
        self.loaded, self.memories = loaded, [*files]
        if not isinstance(loaded.encoder, Fault) and len(files) < num_servers:
            error = ModelError("no files for the memory of batches; raise the limit on open files")
            self.loaded = DeviceLoaded(Fault.of(error))
            self.close_memories()

    def close_memories(self) -> None:
        """Closes the files, once the API servers have them."""
        while self.memories:
            os.close(self.memories.pop())


def _start(spawn: Spawn, module: str, setup: object, files: Sequence[int]) -> tuple[Process, Link]:
    """Starts a process and sends its set-up. Returns the process and our end of the link to it."""
    link, their_link = Link.pair()
    process = spawn(module, their_link)
    their_link.socket.close()
    link.send(setup, files)
    link.socket.setblocking(False)
    return process, link

"""The process that owns the devices, and starts, feeds and ends the API servers.

It accepts connections and hands them out in turn, so that every API server has as many. If a device is lost,
or an API server ends that was not told to, all drain and the exit code is 1.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import uvloop
from prometheus_client import CollectorRegistry, Metric, ProcessCollector

from models import DeviceError, ModelError, Replica, ReplicaGroup, VisionEncoder, replica_devices
from service.api_servers.dispatcher import Client, Dispatcher
from service.api_servers.link import Link
from service.api_servers.memory import SharedMemory
from service.api_servers.merge import merge
from service.api_servers.messages import (
    STOP_SIGNALS,
    EncoderFacts,
    Fault,
    Leaving,
    Loaded,
    Lost,
    Scrape,
    Scraped,
    Setup,
    Stop,
    Up,
)
from service.api_servers.tallies import tallies_memory
from service.replicas import load_replicas
from service.settings import Settings

logger = logging.getLogger(__name__)

# More than any patches of a token have. What is not written takes no memory.
_MAX_TOKEN_BYTES = 2**14
_SERVERS_PER_GPU = 4
_THREADS_PER_SERVER = 4
_ACCEPTED_AT_ONCE = 64
_ACCEPT_PAUSE_S = 1.0  # where the process has no more files
_LAST_WORDS_S = 10.0  # beyond its grace, for an API server that was told to stop
_COMMAND = "import sys; sys.path[:] = {path!r}; from service.api_servers.member import main; main({file})"


def count_servers(settings: Settings) -> int:
    """How many API servers there shall be; 1: no process but this one."""
    if settings.api_server_count:
        return settings.api_server_count
    try:
        devices = replica_devices(settings.device, settings.data_parallel_size)
    except ModelError:
        return 1  # which will say it
    num_gpus = sum(device.type == "cuda" for device in devices.values())
    return max(1, min(_SERVERS_PER_GPU * num_gpus, settings.decode_threads // _THREADS_PER_SERVER))


@dataclass(eq=False)
class Member:
    """One API server, as the supervisor sees it."""

    index: int
    process: subprocess.Popen[bytes]
    line: Link
    connections: Link
    is_up: bool = False
    takes_connections: bool = True
    is_running: bool = True


@dataclass
class _Scraping:
    """One round of asking all for their metrics."""

    askers: list[tuple[Member, int]]
    waits_for: set[Member]
    metrics: list[Sequence[Metric]] = field(default_factory=list)


class Supervisor:
    """Runs on an event loop of its own; devices have their threads as elsewhere."""

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        num_servers: int,
        start_replicas: Callable[[Settings], ReplicaGroup] = load_replicas,
    ) -> None:
        self._settings = settings
        self._start_replicas = start_replicas
        self._listener = listener
        self._num_servers = num_servers
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._members: list[Member] = []
        self._dispatchers: dict[str, Dispatcher] = {}
        self._replicas: dict[str, Replica] = {}
        self._lost: set[str] = set()
        self._is_stopping = False
        self._has_failed = False
        self._has_told = False  # that the model is loaded, or is not
        self._next = 0  # member to get a connection
        self._askers: list[tuple[Member, int]] = []
        self._scraping: _Scraping | None = None

    async def run(self) -> int:
        """Serves until it is told to stop or has failed. Returns the exit code."""
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        for number in STOP_SIGNALS:
            self._loop.add_signal_handler(number, self._on_signal, number)
        try:
            replicas = self._start_replicas(self._settings).replicas
        except ModelError as error:
            logger.error("cannot load model %s: %s", self._settings.served_name, error)
            return 1
        self._replicas = {replica.name: replica for replica in replicas}
        self._start_members(tuple(self._replicas))
        self._serve()
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)
        watching = asyncio.create_task(self._watch(self._settings.device_timeout_s))
        await self._ended.wait()
        watching.cancel()
        return 1 if self._has_failed else 0

    # Start

    def _start_members(self, devices: Sequence[str]) -> None:
        settings = self._settings
        threads = -(-settings.decode_threads // self._num_servers)
        started_at = int(time.time())
        settings = settings.model_copy(update={"decode_threads": threads})
        slot_bytes = max(settings.max_batch_tokens, settings.max_request_tokens) * _MAX_TOKEN_BYTES
        tallies = tallies_memory(self._num_servers)
        slots = {device: SharedMemory.create(slot_bytes) for device in devices}
        clients: dict[str, list[Client]] = {device: [] for device in devices}
        for index in range(self._num_servers):
            connections, their_connections = Link.pair()
            theirs = [their_connections.fileno(), tallies.file]
            ends = [their_connections]
            for device in devices:
                (batches, their_batches), (results, their_results) = Link.pair(), Link.pair()
                clients[device].append(Client(batches, results))
                theirs += [their_batches.fileno(), their_results.fileno(), slots[device].file]
                ends += [their_batches, their_results]
            line, their_line = Link.pair()
            process = self._spawn(their_line)
            setup = Setup(settings, index, self._num_servers, tuple(devices), slot_bytes, started_at)
            line.send(setup, theirs)
            for end in (*ends, their_line):
                end.socket.close()
            self._attend(Member(index, process, line, connections))
        for device in devices:
            self._dispatchers[device] = Dispatcher(
                clients[device],
                slots[device],
                timeout_s=settings.device_timeout_s,
                on_lost=partial(self._from_thread, self._lose, device),
            )

    def _spawn(self, line: Link) -> subprocess.Popen[bytes]:
        """With signals held back, as one to all processes of a group may come before it has its handlers."""
        command = _COMMAND.format(path=sys.path, file=line.fileno())
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return subprocess.Popen(
                [sys.executable, "-c", command], stdin=subprocess.DEVNULL, pass_fds=[line.fileno()]
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _attend(self, member: Member) -> None:
        self._members.append(member)
        for link in (member.line, member.connections):
            link.socket.setblocking(False)
        self._loop.add_reader(member.line.fileno(), self._read, member)
        threading.Thread(
            target=self._wait_for_exit, args=(member,), name=f"exit-{member.index}", daemon=True
        ).start()

    def _wait_for_exit(self, member: Member) -> None:
        code = member.process.wait()
        self._from_thread(self._on_exit, member, code)

    def _serve(self) -> None:
        for replica in self._replicas.values():
            replica.ready.add_done_callback(lambda _: self._from_thread(self._tell_if_loaded))
            serving = replica.serve(self._dispatchers[replica.name])
            serving.add_done_callback(partial(self._on_served, replica))

    def _tell_if_loaded(self) -> None:
        """Once all devices are loaded and all API servers are there, so that all are ready at once."""
        is_loaded = all(replica.ready.done() for replica in self._replicas.values())
        if self._has_told or not is_loaded or not all(member.is_up for member in self._members):
            return
        self._has_told = True
        encoders = {name: _facts(replica.ready) for name, replica in self._replicas.items()}
        gc.collect()
        gc.freeze()
        self._tell_all(Loaded(encoders))
        if any(isinstance(encoder, Fault) for encoder in encoders.values()):
            self._fail()

    # Connections

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.error("cannot accept connections: %s", error.strerror)
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(_ACCEPT_PAUSE_S, self._accept_again)
                return
            with connection:
                self._hand_out(connection)

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _hand_out(self, connection: socket.socket) -> None:
        """To the next API server that has room for it; if none has, it is closed."""
        for _ in self._members:
            member = self._members[self._next % self._num_servers]
            self._next += 1
            if member.takes_connections:
                try:
                    member.connections.send(None, [connection.fileno()])
                except OSError:
                    continue  # it is behind, or gone
                return
        logger.error("no API server takes a connection")

    def _leave(self, member: Member) -> None:
        """Hands out no more connections to a member, and says so by closing the line."""
        if not member.takes_connections:
            return
        member.takes_connections = False
        member.connections.close()
        if not any(other.takes_connections for other in self._members):
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()

    # Messages

    def _read(self, member: Member) -> None:
        try:
            while True:
                message, _ = member.line.receive()
                self._on_message(member, message)
        except BlockingIOError:
            return
        except EOFError:
            self._loop.remove_reader(member.line.fileno())  # its exit is seen elsewhere

    def _on_message(self, member: Member, message: object) -> None:
        match message:
            case Up():
                member.is_up = True
                self._tell_if_loaded()
            case Leaving():
                self._leave(member)
            case Scrape(number):
                self._askers.append((member, number))
                self._scrape()
            case Scraped(_, metrics):
                self._scraped(member, metrics)
            case _:
                raise AssertionError(f"unknown message {message!r}")

    def _tell_all(self, message: object) -> None:
        for member in self._members:
            self._tell(member, message)

    def _tell(self, member: Member, message: object) -> None:
        if member.is_running:
            try:
                member.line.send(message)
            except BlockingIOError:
                logger.critical("API server %d does not listen", member.index)
                self._fail()
                member.process.kill()
            except OSError:
                pass  # it has ended, which is seen elsewhere

    def _from_thread(self, function: Callable[..., None], *args: object) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    # Metrics: one round at a time; who asks meanwhile is answered by the next

    def _scrape(self) -> None:
        if self._scraping is None and self._askers:
            asked = {member for member in self._members if member.is_running}
            self._scraping = _Scraping(self._askers, asked)
            self._askers = []
            for member in asked:
                self._tell(member, Scrape(0))

    def _scraped(self, member: Member, metrics: Sequence[Metric] = ()) -> None:
        scraping = self._scraping
        if scraping is None or member not in scraping.waits_for:
            return
        scraping.waits_for.remove(member)
        scraping.metrics.append(metrics)
        if not scraping.waits_for:
            self._scraping = None
            merged = merge([*scraping.metrics, self._registry.collect()])
            for asker, number in scraping.askers:
                self._tell(asker, Scraped(number, merged))
            self._scrape()

    # End

    def _on_signal(self, number: int) -> None:
        """The first one: all drain. The second: all end at once."""
        if self._is_stopping:
            for member in self._members:
                member.process.kill()
            self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._stop()

    def _stop(self) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        self._tell_all(Stop())
        seconds = self._settings.shutdown_delay_s + self._settings.shutdown_grace_s + _LAST_WORDS_S
        self._loop.call_later(seconds, self._kill)

    def _kill(self) -> None:
        for member in self._members:
            if member.is_running:
                logger.error("API server %d does not end and is killed", member.index)
                member.process.kill()

    def _fail(self) -> None:
        self._has_failed = True
        self._stop()

    def _on_exit(self, member: Member, code: int) -> None:
        member.is_running = False
        self._leave(member)
        self._scraped(member)
        if code not in (0, 1) or not (self._is_stopping or self._has_failed):
            logger.critical("API server %d ended with %d; the server must be restarted", member.index, code)
            self._fail()
        if not any(other.is_running for other in self._members):
            self._ended.set()

    # Devices

    def _on_served(self, replica: Replica, serving: Future[None]) -> None:
        """A thread that takes no batches any more, and was not told to end, has lost its device."""
        error = serving.exception()
        if error is not None and replica.ready.exception() is None:
            self._from_thread(self._lose, replica.name, DeviceError(replica.name, error))

    def _lose(self, device: str, error: DeviceError) -> None:
        if device not in self._lost:
            self._lost.add(device)
            self._tell_all(Lost(device, Fault.of(error)))
            self._fail()

    async def _watch(self, timeout_s: float) -> None:
        while True:
            await asyncio.sleep(min(1.0, timeout_s / 4))
            for device, dispatcher in self._dispatchers.items():
                if dispatcher.is_stuck(timeout_s):
                    cause = TimeoutError(f"it has work and finished nothing for {timeout_s:g} s")
                    self._lose(device, DeviceError(device, cause))


def _facts(ready: Future[VisionEncoder]) -> EncoderFacts | Fault:
    error = ready.exception()
    return EncoderFacts.of(ready.result()) if error is None else Fault.of(error)


def supervise(
    settings: Settings,
    listener: socket.socket,
    num_servers: int,
    start_replicas: Callable[[Settings], ReplicaGroup] = load_replicas,
) -> NoReturn:
    """Serves with so many API servers, and ends the process as a single one would."""
    supervisor = Supervisor(settings, listener, num_servers, start_replicas)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(supervisor.run())
    logger.info("stopped")
    logging.shutdown()
    os._exit(code)

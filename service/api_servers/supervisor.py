"""The process that owns the devices, and starts, feeds and ends the API servers.

If a device is lost, or an API server ends that was not told to or does not answer any more, all drain and the
exit code is 1.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NoReturn

import uvloop
from prometheus_client import CollectorRegistry, ProcessCollector

from models import (
    MAX_ASPECT_RATIO,
    DeviceError,
    ModelError,
    Replica,
    ReplicaGroup,
    VisionEncoder,
    replica_devices,
)
from service.api_servers.dispatcher import Dispatcher
from service.api_servers.members import Member
from service.api_servers.memory import SharedMemory
from service.api_servers.messages import (
    STOP_SIGNALS,
    EncoderFacts,
    Farewell,
    Fault,
    Full,
    Leaving,
    Loaded,
    Lost,
    Ping,
    Pong,
    Scrape,
    Scraped,
    Setup,
    Stop,
    Up,
)
from service.api_servers.reception import Reception
from service.api_servers.scraping import Scraping
from service.api_servers.tallies import tallies_memory
from service.engine import keep_what_is_loaded, stuck
from service.replicas import load_replicas
from service.settings import Settings

logger = logging.getLogger(__name__)

_SERVERS_PER_GPU = 4
_THREADS_PER_SERVER = 4
_MARGIN_TOKENS = 2 * MAX_ASPECT_RATIO
_LAST_WORDS_S = 10.0  # beyond its grace, for an API server that was told to stop


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
        self._listener = listener
        self._num_servers = num_servers
        self._start_replicas = start_replicas
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._members: list[Member] = []
        self._dispatchers: dict[str, Dispatcher] = {}
        self._replicas: dict[str, Replica] = {}
        self._scraping = Scraping(self._members, self._tell, self._registry.collect)
        self._lost: set[str] = set()
        self._was_signalled = False
        self._is_stopping = False
        self._has_failed = False
        self._has_told = False  # that the model is loaded, or is not

    async def run(self) -> int:
        """Serves until it is told to stop or has failed. Returns the exit code."""
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        for number in STOP_SIGNALS:
            self._loop.add_signal_handler(number, self._on_signal, number)
        try:
            replicas = self._start_replicas(self._settings).replicas
            self._replicas = {replica.name: replica for replica in replicas}
            self._start_members()
        except ModelError as error:
            logger.error("cannot load model %s: %s", self._settings.served_name, error)
            return 1
        except OSError as error:
            logger.error("cannot start %d API servers: %s", self._num_servers, error)
            self._kill()
            return 1
        self._serve()
        self._reception = Reception(self._listener, self._members)
        watching = asyncio.create_task(self._watch(self._settings.device_timeout_s))
        watching.add_done_callback(self._on_watch_ended)
        await self._ended.wait()
        watching.cancel()
        return 1 if self._has_failed else 0

    # Start

    def _start_members(self) -> None:
        threads = -(-self._settings.decode_threads // self._num_servers)
        settings = self._settings.model_copy(update={"decode_threads": threads})
        tallies = tallies_memory(self._num_servers)
        started_at = int(time.time())
        for index in range(self._num_servers):
            setup = Setup(settings, index, self._num_servers, tuple(self._replicas), started_at)
            member = Member.start(setup, tallies)
            self._members.append(member)
            self._loop.add_reader(member.line.fileno(), self._read, member)
            threading.Thread(
                target=self._wait_for_exit, args=(member,), name=f"exit-{index}", daemon=True
            ).start()
        tallies.close_file()

    def _serve(self) -> None:
        for device, replica in self._replicas.items():
            dispatcher = Dispatcher(
                [member.clients[device] for member in self._members],
                on_lost=partial(self._from_thread, self._lose, device),
                count_idle_others=partial(self._count_idle_but, device),
            )
            self._dispatchers[device] = dispatcher
            replica.ready.add_done_callback(lambda _: self._from_thread(self._tell_if_loaded))
            serving = replica.serve(dispatcher)
            serving.add_done_callback(partial(self._on_served, replica))

    def _count_idle_but(self, device: str) -> int:
        others = self._dispatchers.keys() - self._lost - {device}
        return sum(self._dispatchers[other].is_idle for other in others)

    def _tell_if_loaded(self) -> None:
        """Once all devices are loaded and all API servers are there, so that all are ready at once."""
        is_loaded = all(replica.ready.done() for replica in self._replicas.values())
        if self._has_told or not is_loaded or not all(member.is_up for member in self._members):
            return
        self._has_told = True
        encoders = {name: _facts(replica.ready) for name, replica in self._replicas.items()}
        if any(isinstance(encoder, Fault) for encoder in encoders.values()):
            self._tell_all(Loaded(encoders, 0))
            self._fail()
            return
        keep_what_is_loaded()
        num_bytes = max(self._batch_bytes(encoder) for encoder in encoders.values())
        try:
            for member in self._members:
                self._tell_loaded(member, Loaded(encoders, num_bytes))
        except OSError as error:
            logger.error("no shared memory for batches of %d bytes: %s", num_bytes, error)
            self._fail()

    def _tell_loaded(self, member: Member, loaded: Loaded) -> None:
        """With memory for the patches of a batch on their way to each device."""
        for client in member.clients.values():
            client.memory = SharedMemory.create(loaded.memory_bytes)
        memories = [client.memory for client in member.clients.values() if client.memory is not None]
        self._tell(member, loaded, [memory.file for memory in memories])
        for memory in memories:
            memory.close_file()

    def _batch_bytes(self, encoder: EncoderFacts | Fault) -> int:
        """Of the largest batch: a full one or one large image. What is not written is no memory yet.

        A small `max_pixels` is no exact limit for a thin image, hence the margin.
        """
        assert isinstance(encoder, EncoderFacts), "an encoder that is not loaded has no batches"
        config = encoder.preprocessor.config
        token_pixels = config.factor**2
        largest_image = max(config.min_pixels, config.max_pixels) // token_pixels + _MARGIN_TOKENS
        return 3 * token_pixels * max(self._settings.max_batch_tokens, largest_image)

    # Messages

    def _read(self, member: Member) -> None:
        try:
            while True:
                message, files = member.line.receive()
                self._on_message(member, message)
                for file in files:  # connections that it had no room for
                    self._reception.take_back(socket.socket(fileno=file))
        except BlockingIOError:
            return
        except EOFError:
            self._loop.remove_reader(member.line.fileno())  # its exit is seen elsewhere
        except OSError as error:
            logger.error("a message of API server %d is lost: %s", member.index, error)

    def _on_message(self, member: Member, message: object) -> None:
        match message:
            case Up():
                member.is_up = True
                self._tell_if_loaded()
            case Pong():
                member.pinged_at = None
            case Full(is_full):
                member.is_full = is_full
            case Leaving():
                self._leave(member)
            case Scrape():
                self._scraping.ask(member)
            case Scraped(metrics):
                self._scraping.answered(member, metrics)
            case Farewell(metrics):
                self._scraping.ended(member, metrics)
            case _:
                raise AssertionError(f"unknown message {message!r}")

    def _tell_all(self, message: object) -> None:
        for member in self._members:
            self._tell(member, message)

    def _tell(self, member: Member, message: object, files: Sequence[int] = ()) -> None:
        if member.is_running:
            try:
                member.tell(message, files)
            except ConnectionError:
                pass  # it has ended, which is seen elsewhere
            except OSError as error:
                logger.critical("API server %d cannot be told anything: %s", member.index, error)
                member.process.kill()

    def _from_thread(self, function: Callable[..., None], *args: object) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    # End

    def _on_signal(self, number: int) -> None:
        """The first one: all drain. The second: all end at once."""
        if self._was_signalled:
            self._kill()
            self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._was_signalled = True
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
                member.process.kill()

    def _fail(self) -> None:
        self._has_failed = True
        self._stop()

    def _leave(self, member: Member) -> None:
        member.stop_connections()
        self._reception.close_if_alone()

    def _wait_for_exit(self, member: Member) -> None:
        code = member.process.wait()
        self._from_thread(self._on_exit, member, code)

    def _on_exit(self, member: Member, code: int) -> None:
        self._read(member)  # its last words
        member.is_running = False
        self._leave(member)
        self._scraping.gone(member)
        if (code != 0 and not self._has_failed) or not self._is_stopping:
            logger.critical("API server %d ended with %d; the server must be restarted", member.index, code)
            self._fail()
        if not any(other.is_running for other in self._members):
            self._ended.set()

    # Watching

    async def _watch(self, timeout_s: float) -> None:
        """For devices that get stuck, and API servers that do not answer."""
        while True:
            await asyncio.sleep(min(1.0, timeout_s / 4))
            for device, dispatcher in self._dispatchers.items():
                if dispatcher.is_stuck(timeout_s):
                    self._lose(device, stuck(device, timeout_s))
            for member in self._members:
                if member.is_up and member.is_running:
                    self._ping(member, timeout_s)

    def _ping(self, member: Member, timeout_s: float) -> None:
        if member.pinged_at is None:
            member.pinged_at = time.monotonic()
            self._tell(member, Ping())
        elif member.silent_s > timeout_s:
            logger.critical("API server %d has not answered for %g s", member.index, timeout_s)
            member.process.kill()

    def _on_watch_ended(self, watching: asyncio.Task[None]) -> None:
        error = None if watching.cancelled() else watching.exception()
        if error is not None:
            logger.critical("cannot watch devices and API servers: %s", error, exc_info=error)
            self._fail()

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

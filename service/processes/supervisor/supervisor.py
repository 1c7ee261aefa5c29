"""The process that starts, watches and ends the others.

If a device is lost, a process exits unexpectedly or does not answer any more, all API servers drain and the
exit code is 1.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import uvloop
from prometheus_client import CollectorRegistry, ProcessCollector

from models import DeviceError, ModelError, replica_devices
from service.config.logs import end_process
from service.config.settings import Settings
from service.processes.supervisor.members import DeviceMember, Member, ServerMember, Spawn, spawn
from service.processes.supervisor.scraping import Scraping
from service.processes.supervisor.watching import Watch
from service.processes.wire.memory import SharedMemory
from service.processes.wire.messages import (
    STOP_SIGNALS,
    DeviceLoaded,
    DeviceSetup,
    Farewell,
    Fault,
    Gather,
    Loaded,
    Lost,
    Pong,
    Scraped,
    Setup,
    Stop,
    Up,
)
from service.processes.wire.tallies import SharedIdleness, SharedTallies, tallies_memory

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 10.0  # after the grace, for an API server to exit
_DEVICE_END_S = 5.0  # for the process of a device to exit once no API server is left


class Supervisor:
    """Runs in the main thread, on an event loop. Gives `listener` to the API servers."""

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        num_servers: int,
        spawn_device: Spawn = spawn,
        device_end_s: float = _DEVICE_END_S,
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._num_servers = num_servers
        self._spawn_device = spawn_device
        self._device_end_s = device_end_s
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._servers: list[ServerMember] = []
        self._devices: dict[str, DeviceMember] = {}
        self._members: list[Member] = []  # API servers and devices
        self._scraping = Scraping(self._members, self._tell, self._registry.collect)
        self._lost: set[str] = set()
        self._was_signalled = False
        self._is_stopping = False
        self._has_failed = False
        self._has_told_loaded = False
        self._needs_devices = True

    async def run(self) -> int:
        """Serves until a signal or a failure. Returns the exit code."""
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        for number in STOP_SIGNALS:
            self._loop.add_signal_handler(number, self._on_signal, number)
        try:
            devices = tuple(replica_devices(self._settings.device, self._settings.data_parallel_size))
            self._start_servers(devices)
            self._start_devices(devices)
        except ModelError as error:
            logger.error("cannot load model %s: %s", self._settings.served_name, error)
            return 1
        except OSError as error:
            logger.error("cannot start the processes of the server: %s", error)
            self._kill()
            return 1
        watch = Watch(self._members, self._tell, self._settings.device_timeout_s, self._on_silent)
        watching = asyncio.create_task(watch.run())
        watching.add_done_callback(self._on_watch_ended)
        await self._ended.wait()
        watching.cancel()
        return 1 if self._has_failed else 0

    # Start

    def _start_servers(self, devices: tuple[str, ...]) -> None:
        threads = -(-self._settings.decode_threads // self._num_servers)
        settings = self._settings.model_copy(update={"decode_threads": threads})
        self._tallies = tallies_memory(self._num_servers)
        started_at = int(time.time())
        for index in range(self._num_servers):
            setup = Setup(settings, index, self._num_servers, devices, started_at)
            self._servers.append(ServerMember.start(setup, self._listener, self._tallies))
            self._attend(self._servers[-1])
        self._tallies.close_file()
        self._listener.close()  # the API servers keep it open

    def _start_devices(self, devices: tuple[str, ...]) -> None:
        self._idleness = SharedMemory.create(len(devices))
        for index, device in enumerate(devices):
            setup = DeviceSetup(self._settings, device, index, len(devices))
            member = DeviceMember.start(setup, self._idleness, self._servers, self._spawn_device)
            self._devices[device] = member
            self._attend(member)
        self._idleness.close_file()

    def _attend(self, member: Member) -> None:
        self._members.append(member)
        self._loop.add_reader(member.link.fileno(), self._read, member)
        threading.Thread(
            target=self._wait_for_exit, args=(member,), name=f"exit of {member.name}", daemon=True
        ).start()

    def _wait_for_exit(self, member: Member) -> None:
        code = member.process.wait()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._on_exit, member, code)

    def _tell_if_loaded(self) -> None:
        """Tells the API servers once all are up, and all devices are loaded or one cannot be.

        So all API servers become ready at the same time.
        """
        devices = {name: device.loaded for name, device in self._devices.items() if device.loaded is not None}
        has_failed = any(isinstance(loaded.encoder, Fault) for loaded in devices.values())
        is_decided = has_failed or len(devices) == len(self._devices)
        if self._has_told_loaded or not is_decided or not all(server.is_up for server in self._servers):
            return
        self._has_told_loaded = True
        holders = [device for device in self._devices.values() if device.memories]
        for server in self._servers:
            self._tell(server, Loaded(devices), [device.memories[server.index] for device in holders])
        for device in holders:
            device.close_memories()
        if has_failed:
            self._fail()

    # Messages

    def _read(self, member: Member) -> None:
        try:
            while True:
                self._on_message(member, *member.link.receive())
        except BlockingIOError:
            return
        except EOFError:
            self._loop.remove_reader(member.link.fileno())  # `_on_exit` handles the rest
        except OSError as error:
            logger.error("a message of %s is lost: %s", member.name, error)

    def _on_message(self, member: Member, message: object, files: Sequence[int]) -> None:
        match member, message:
            case ServerMember(), Up():
                member.is_up = True
                self._tell_if_loaded()
            case DeviceMember(), DeviceLoaded():
                member.is_up = True
                member.take_loaded(message, files, len(self._servers))
                self._tell_if_loaded()
            case DeviceMember(), Lost(device, fault):
                self._lose(device, fault)
            case _, Pong():
                member.pinged_at = None
            case ServerMember(), Gather(number):
                self._scraping.ask(member, number)
            case _, Scraped(metrics):
                self._scraping.on_scraped(member, metrics)
            case ServerMember(), Farewell(metrics):
                self._scraping.on_farewell(member, metrics)
            case _:
                raise AssertionError(f"unknown message {message!r}")

    def _tell_servers(self, message: object) -> None:
        for server in self._servers:
            self._tell(server, message)

    def _tell(self, member: Member, message: object, files: Sequence[int] = ()) -> None:
        if member.is_running:
            try:
                member.tell(message, files)
            except ConnectionError:
                pass  # it has exited, and `_on_exit` handles that
            except OSError as error:
                logger.critical("%s cannot be told anything: %s", member.name, error)
                member.process.kill()

    # End

    def _on_signal(self, number: int) -> None:
        """At the first signal all processes drain; at the second all are killed."""
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
        self._tell_servers(Stop())
        seconds = self._settings.shutdown_delay_s + self._settings.shutdown_grace_s + _LAST_WORDS_S
        self._loop.call_later(seconds, self._kill)
        self._loop.call_later(seconds + self._device_end_s, self._give_up)

    def _kill(self) -> None:
        for member in self._members:
            if member.is_running:
                member.process.kill()

    def _fail(self) -> None:
        self._has_failed = True
        self._stop()

    def _on_exit(self, member: Member, code: int) -> None:
        if member.link.fileno() >= 0:
            self._read(member)  # its last messages
        member.is_running = False
        self._scraping.on_exit(member)
        match member:
            case ServerMember():
                self._on_server_exit(member, code)
            case DeviceMember():
                self._on_device_exit(member, code)
        if self._needs_devices and not any(server.is_running for server in self._servers):
            self._release_devices()
        if not any(other.is_running for other in self._members):
            self._ended.set()

    def _on_server_exit(self, server: ServerMember, code: int) -> None:
        SharedTallies.of(self._tallies, server.index, self._num_servers).connections.leave()
        if (code != 0 and not self._has_failed) or not self._is_stopping:
            logger.critical("%s ended with %d; the server must be restarted", server.name, code)
            self._fail()

    def _on_device_exit(self, device: DeviceMember, code: int) -> None:
        """The device is lost, unless its process was told to exit."""
        if not self._needs_devices:
            return
        error = f"its process ended with {code}"
        if device.loaded is None:
            device.loaded = DeviceLoaded(
                Fault.of(ModelError(f"device {device.device} cannot load it: {error}"))
            )
            self._tell_if_loaded()
        else:
            self._lose(device.device, Fault.of(DeviceError(device.device, ChildProcessError(error))))

    def _release_devices(self) -> None:
        """Closes the links to the devices, at which their processes exit. No API server is left."""
        self._needs_devices = False
        for device in self._devices.values():
            device.is_up = False
            self._loop.remove_reader(device.link.fileno())
            device.link.close()
        self._loop.call_later(self._device_end_s, self._give_up)

    def _give_up(self) -> None:
        """Ends without waiting any longer. A process may hang in a driver, where no signal ends it."""
        for member in self._members:
            if member.is_running:
                logger.warning("%s does not end, and is killed", member.name)
        self._kill()
        self._ended.set()

    # Watching

    def _on_silent(self, member: Member, message: str) -> None:
        match member:
            case DeviceMember(device=device):
                error = DeviceError(device, TimeoutError(f"its process {message}"))
                self._lose(device, Fault.of(error))
            case _:
                logger.critical("%s %s; the server must be restarted", member.name, message)
                self._fail()

    def _on_watch_ended(self, watching: asyncio.Task[None]) -> None:
        error = None if watching.cancelled() else watching.exception()
        if error is not None:
            logger.critical("cannot watch the other processes: %s", error, exc_info=error)
            self._fail()

    def _lose(self, device: str, fault: Fault) -> None:
        if device not in self._lost:
            self._lost.add(device)
            logger.critical("%s", fault.device_error())
            SharedIdleness(self._idleness, [*self._devices].index(device)).retire()
            self._tell_servers(Lost(device, fault))
            self._fail()


def supervise(settings: Settings, listener: socket.socket, num_servers: int) -> NoReturn:
    """Serves with `num_servers` API servers, and exits like the server of a single process."""
    supervisor = Supervisor(settings, listener, num_servers)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(supervisor.run())
    logger.info("stopped")
    end_process(code)

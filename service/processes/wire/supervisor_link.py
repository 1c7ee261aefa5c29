"""The link of a process to the supervisor, read on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from service.config.logs import end_process
from service.processes.wire.link import Link
from service.processes.wire.messages import Ping, Pong

logger = logging.getLogger(__name__)

OnMessage = Callable[[object, Sequence[int]], None]


class SupervisorLink:
    """Answers pings, and hands on all other messages.

    `on_exit` is called when the supervisor exits. If a message cannot be handled, the process exits at once.
    """

    def __init__(self, link: Link, on_exit: Callable[[], None]) -> None:
        self._link = link
        self._on_exit = on_exit

    def listen(self, on_message: OnMessage) -> None:
        """Calls `on_message` with every message and its files from now on."""
        self._on_message = on_message
        self._link.socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._link.fileno(), self._read)

    def tell(self, message: object, files: Sequence[int] = ()) -> None:
        """Sends a message to the supervisor. Raises `OSError`."""
        self._link.send(message, files)

    def _read(self) -> None:
        try:
            while (received := self._receive()) is not None:
                message, files = received
                if isinstance(message, Ping):
                    self.tell(Pong())
                else:
                    self._on_message(message, files)
        except (EOFError, ConnectionError):
            asyncio.get_running_loop().remove_reader(self._link.fileno())
            self._on_exit()
        except Exception:
            logger.critical("cannot handle a message of the supervisor", exc_info=True)
            end_process(1)

    def _receive(self) -> tuple[Any, list[int]] | None:
        """Returns None if no message waits."""
        try:
            return self._link.receive()
        except BlockingIOError:
            return None

"""A process's line to the supervisor, on the event loop: orders and pings."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from service.processes.wire.link import Link
from service.processes.wire.messages import Ping, Pong

logger = logging.getLogger(__name__)

Obey = Callable[[object, Sequence[int]], None]


class SupervisorLink:
    """`on_gone` is told that the supervisor is. A process that cannot do what it is told ends at once."""

    def __init__(self, link: Link, on_gone: Callable[[], None]) -> None:
        self._link = link
        self._on_gone = on_gone

    def listen(self, obey: Obey) -> None:
        """Has every message that is not for the line itself obeyed, from now on."""
        self._obey = obey
        self._link.socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._link.fileno(), self._read)

    def tell(self, message: object, files: Sequence[int] = ()) -> None:
        """Tells the supervisor. Raises `OSError` where that cannot be."""
        self._link.send(message, files)

    def _read(self) -> None:
        try:
            while (received := self._receive()) is not None:
                message, files = received
                if isinstance(message, Ping):
                    self.tell(Pong())
                else:
                    self._obey(message, files)
        except (EOFError, ConnectionError):
            asyncio.get_running_loop().remove_reader(self._link.fileno())
            self._on_gone()
        except Exception:
            logger.critical("cannot do what the supervisor says", exc_info=True)
            os._exit(1)

    def _receive(self) -> tuple[Any, list[int]] | None:
        """None: there is no more for now."""
        try:
            return self._link.receive()
        except BlockingIOError:
            return None

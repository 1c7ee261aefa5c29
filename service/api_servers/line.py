"""An API server's line to the supervisor, on the event loop: orders, pings, and the metrics of all."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence

from prometheus_client import Metric

from service.api_servers.link import Link
from service.api_servers.merge import Merged
from service.api_servers.messages import Ping, Pong, Scrape, Scraped
from service.errors import Unavailable
from service.metrics import Collects

logger = logging.getLogger(__name__)

_SCRAPE_TIMEOUT_S = 5.0

Obey = Callable[[object, Sequence[int]], None]
Answers = list["asyncio.Future[Sequence[Metric] | None]"]


class Line:
    """A process whose supervisor is gone ends at once, and so does one that cannot do what it is told."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._asking: Answers = []
        self._asking_next: Answers = []  # since then

    def listen(self, obey: Obey) -> None:
        """Has every message that is not for the line itself obeyed, from now on."""
        self._obey = obey
        self._link.socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._link.fileno(), self._read)

    def tell(self, message: object, files: Sequence[int] = ()) -> None:
        """Tells the supervisor. Raises `OSError` where that cannot be."""
        self._link.send(message, files)

    async def gather(self) -> Collects:
        """The metrics of all processes. Raises `Unavailable` where one of them does not answer."""
        answer: asyncio.Future[Sequence[Metric] | None] = asyncio.get_running_loop().create_future()
        if self._asking:
            self._asking_next.append(answer)
        else:
            self._ask([answer])
        try:
            async with asyncio.timeout(_SCRAPE_TIMEOUT_S):
                metrics = await answer
        except TimeoutError:
            metrics = None
            if answer in self._asking:  # the answer to it was lost
                self._scraped(None)
        if metrics is None:
            raise Unavailable("not all of the server's processes answer", code="not_ready")
        return Merged(metrics)

    def _ask(self, answers: Answers) -> None:
        """For all who want to know: one question at a time is on its way."""
        self._asking = answers
        try:
            self.tell(Scrape())
        except OSError as error:
            logger.error("cannot ask for metrics: %s", error)
            self._settle(None)

    def _scraped(self, metrics: Sequence[Metric] | None) -> None:
        self._settle(metrics)
        if self._asking_next:
            answers, self._asking_next = self._asking_next, []
            self._ask(answers)

    def _settle(self, metrics: Sequence[Metric] | None) -> None:
        answers, self._asking = self._asking, []
        for answer in answers:
            if not answer.done():
                answer.set_result(metrics)

    def _read(self) -> None:
        try:
            while True:
                message, files = self._link.receive()
                if isinstance(message, Ping):
                    self.tell(Pong())
                elif isinstance(message, Scraped):
                    self._scraped(message.metrics)
                else:
                    self._obey(message, files)
        except BlockingIOError:
            return
        except EOFError:
            os._exit(1)
        except Exception:
            logger.critical("cannot do what the supervisor says", exc_info=True)
            os._exit(1)

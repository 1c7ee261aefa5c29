"""The metrics of all processes, for those who ask one API server. The supervisor gathers them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from prometheus_client import Metric

from service.errors import Unavailable
from service.metrics import Collects
from service.processes.wire.merge import Merged
from service.processes.wire.messages import Scrape

logger = logging.getLogger(__name__)

_SCRAPE_TIMEOUT_S = 5.0

Answers = list["asyncio.Future[Sequence[Metric] | None]"]


class Gathering:
    """One question at a time is on its way, for all who want to know. `tell` tells the supervisor."""

    def __init__(self, tell: Callable[[object], None]) -> None:
        self._tell = tell
        self._asking: Answers = []
        self._asking_next: Answers = []  # since then

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
                self.answered(None)
        if metrics is None:
            raise Unavailable("not all of the server's processes answer", code="not_ready")
        return Merged(metrics)

    def answered(self, metrics: Sequence[Metric] | None) -> None:
        """What the supervisor has gathered; None where not all have answered."""
        self._settle(metrics)
        if self._asking_next:
            answers, self._asking_next = self._asking_next, []
            self._ask(answers)

    def _ask(self, answers: Answers) -> None:
        self._asking = answers
        try:
            self._tell(Scrape())
        except OSError as error:
            logger.error("cannot ask for metrics: %s", error)
            self._settle(None)

    def _settle(self, metrics: Sequence[Metric] | None) -> None:
        answers, self._asking = self._asking, []
        for answer in answers:
            if not answer.done():
                answer.set_result(metrics)

"""Asks the supervisor for the metrics of all processes, for requests to one API server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from prometheus_client import Metric

from service.errors import Unavailable
from service.metrics import Collects
from service.processes.wire.messages import Gather

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class GatheredMetrics:
    """Metrics in the place of a registry."""

    metrics: Sequence[Metric]

    def collect(self) -> Iterable[Metric]:
        """The metrics."""
        return self.metrics


class ScrapeClient:
    """Sends one `Gather` message for each call, through `tell`. The supervisor joins calls."""

    def __init__(self, tell: Callable[[object], None]) -> None:
        self._tell = tell
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Sequence[Metric] | None]] = {}

    async def gather(self) -> Collects:
        """Returns the metrics of all processes. Raises `Unavailable` if a process does not answer."""
        metrics = await self._ask(next(self._numbers))
        if metrics is None:
            raise Unavailable("not all of the server's processes answer", code="not_ready")
        return GatheredMetrics(metrics)

    async def _ask(self, number: int) -> Sequence[Metric] | None:
        answer: asyncio.Future[Sequence[Metric] | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._tell(Gather(number))
            async with asyncio.timeout(_TIMEOUT_S):
                return await answer
        except TimeoutError:
            return None
        except OSError as error:
            logger.error("cannot ask for metrics: %s", error)
            return None
        finally:
            del self._waiting[number]

    def on_gathered(self, numbers: Iterable[int], metrics: Sequence[Metric] | None) -> None:
        """Ends the calls with these numbers. `metrics` is None if a process did not answer."""
        for number in numbers:
            answer = self._waiting.get(number)
            if answer is not None and not answer.done():
                answer.set_result(metrics)

"""The state of one request from its first byte to its last: its id, its stages, and its response so far.

The middleware creates it, the pipeline fills in the stages, and the middleware reads it for headers, the log
and metrics. Knows nothing of images or options.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

from starlette.types import Scope

from service.errors import ErrorCode
from service.metrics import Stage

_KEY = "vision_sidecar.context"


@dataclass(slots=True)
class RequestContext:
    """One request. Times are in seconds; `started_at` is by `time.perf_counter()`."""

    request_id: str
    method: str
    is_logged: bool = True
    started_at: float = field(default_factory=time.perf_counter)
    body_has_arrived: bool = False
    stages_s: dict[Stage, float] = field(default_factory=dict)  # wall time of each stage that has ended
    status: int = 500  # of the response, once it has begun
    response_has_begun: bool = False
    is_cached: bool = False  # all its results were there before
    error_code: ErrorCode | None = None  # of the response, if it is an error

    def attach(self, scope: Scope) -> None:
        """Stores the context in the scope, for `context_of`."""
        scope[_KEY] = self

    @property
    def duration_s(self) -> float:
        """Time since the request began."""
        return time.perf_counter() - self.started_at

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        """Measures a stage: the block, unless it raises. The times of a stage that runs twice add up."""
        started_at = time.perf_counter()
        yield
        self.stages_s[name] = self.stages_s.get(name, 0.0) + time.perf_counter() - started_at


def context_of(scope: Scope) -> RequestContext:
    """The context that the middleware attached to the request."""
    return cast(RequestContext, scope[_KEY])

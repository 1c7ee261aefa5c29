"""What is known of one request from the first byte to the last: its id and how long its stages took.

Made by the middleware, filled by whoever does the work, read by the middleware again for headers and metrics.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import cast

from starlette.types import Scope

from service.metrics import Stage

_KEY = "vision_sidecar.context"


@dataclass(slots=True)
class RequestContext:
    """One request. `started_at` is by `time.perf_counter()`; `stages_s` holds the wall time of each
    stage so far, in seconds.
    """

    request_id: str
    started_at: float = field(default_factory=time.perf_counter)
    body_has_arrived: bool = False
    stages_s: dict[Stage, float] = field(default_factory=dict)

    def attach(self, scope: Scope) -> None:
        """Leaves the context where `context_of` finds it."""
        scope[_KEY] = self


def context_of(scope: Scope) -> RequestContext:
    """The context that the middleware attached to the request."""
    return cast(RequestContext, scope[_KEY])

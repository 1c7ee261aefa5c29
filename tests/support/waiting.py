"""Waiting in a test for another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], *, timeout_s: float = 20) -> None:
    """Waits until `condition` is true. Fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition was still false after {timeout_s:g} s"
        time.sleep(0.002)

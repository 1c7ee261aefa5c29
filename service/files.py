"""How many files the process may have open: each connection is one."""

from __future__ import annotations

import resource


def allow_many_files() -> None:
    """Raises the limit to the most that the process may choose."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

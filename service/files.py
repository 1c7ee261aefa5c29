"""How many files the process may have open: each connection is one."""

from __future__ import annotations

import resource

_KEPT = 512  # for what else the process opens


def allow_many_files() -> None:
    """Raises the limit to the most that the process may choose."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections() -> int:
    """How many connections leave files for all else."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(limit - _KEPT, limit // 2)

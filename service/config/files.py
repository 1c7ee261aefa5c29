"""How many files the process may have open: each connection is one."""

from __future__ import annotations

import logging
import resource
import sys
from typing import Protocol

logger = logging.getLogger(__name__)

_KEPT = 512  # for what else the process opens
# Tried in turn where the hard limit is refused: macOS calls it infinite, and takes finite ones only.
_INSTEAD = tuple(2**power for power in range(20, 9, -1))


class Limits(Protocol):
    """What is used of the module `resource`."""

    def getrlimit(self, resource: int, /) -> tuple[int, int]: ...

    def setrlimit(self, resource: int, limits: tuple[int, int], /) -> None: ...


def allow_many_files(limits: Limits = resource) -> None:
    """Raises the limit to the most that the system lets the process choose. Never fails."""
    soft, hard = limits.getrlimit(resource.RLIMIT_NOFILE)
    refusal: Exception | None = None
    for wanted in (hard, *_INSTEAD):
        if not _number(soft) < _number(wanted) <= _number(hard):
            continue
        try:
            limits.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError) as error:
            refusal = refusal or error
        else:
            return
    if refusal:
        logger.info("no more than %d files may be open at once, as before: %s", soft, refusal)


def max_connections(limits: Limits = resource) -> int:
    """How many connections leave files for all else."""
    limit = _number(limits.getrlimit(resource.RLIMIT_NOFILE)[0])
    return max(limit - _KEPT, limit // 2)


def _number(limit: int) -> int:
    """A limit that can be compared: infinity is -1 on Linux."""
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit

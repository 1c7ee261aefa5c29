"""The limit on open files of this process. Each connection is an open file."""

from __future__ import annotations

import logging
import resource
import sys
from typing import Protocol

logger = logging.getLogger(__name__)

_RESERVED = 512  # open files that are no connections
# Tried one after the other if the hard limit is refused: on macOS it is infinite, but only finite limits are
# accepted.
_FINITE_LIMITS = tuple(2**power for power in range(20, 9, -1))


class Limits(Protocol):
    """The functions of the module `resource` that are used here."""

    def getrlimit(self, resource: int, /) -> tuple[int, int]: ...

    def setrlimit(self, resource: int, limits: tuple[int, int], /) -> None: ...


def allow_many_files(limits: Limits = resource) -> None:
    """Raises the limit as far as the system allows. Logs a refusal; never fails."""
    soft, hard = limits.getrlimit(resource.RLIMIT_NOFILE)
    refusal: Exception | None = None
    for wanted in (hard, *_FINITE_LIMITS):
        if not _number(soft) < _number(wanted) <= _number(hard):
            continue
        try:
            limits.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError) as error:
            refusal = refusal or error
        else:
            return
    if refusal:
        logger.info("the limit of open files stays %d: %s", soft, refusal)


def max_connections(limits: Limits = resource) -> int:
    """The most connections that leave enough open files for everything else."""
    limit = _number(limits.getrlimit(resource.RLIMIT_NOFILE)[0])
    return max(limit - _RESERVED, limit // 2)


def _number(limit: int) -> int:
    """The limit as a number that can be compared. On Linux, infinity is -1."""
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit

"""The limit on open files, on systems that accept different limits."""

from __future__ import annotations

import logging
import sys
from resource import RLIM_INFINITY, RLIMIT_NOFILE

import pytest

from service.config.files import allow_many_files, max_connections


class FakeLimits:
    """A system that accepts finite limits up to `largest`, and raises `refusal` for others."""

    def __init__(self, soft: int, hard: int, largest: int, refusal: Exception) -> None:
        self._now = (soft, hard)
        self._largest = largest
        self._refusal = refusal

    def getrlimit(self, resource: int, /) -> tuple[int, int]:
        assert resource == RLIMIT_NOFILE
        return self._now

    def setrlimit(self, resource: int, limits: tuple[int, int], /) -> None:
        assert resource == RLIMIT_NOFILE
        if limits[0] == RLIM_INFINITY or limits[0] > self._largest:
            raise self._refusal
        self._now = limits


REFUSALS = [ValueError("current limit exceeds maximum limit"), OSError(22, "Invalid argument")]


@pytest.mark.parametrize("refusal", REFUSALS, ids=["ValueError", "OSError"])
@pytest.mark.parametrize(
    ("soft", "hard", "largest", "expected"),
    [
        (1024, 4096, 10**6, 4096),
        (4096, 4096, 10**6, 4096),
        (256, RLIM_INFINITY, 61440, 32768),
        (256, RLIM_INFINITY, 10240, 8192),
        (256, RLIM_INFINITY, 2**20, 2**20),
        (256, 2**21, 2**20, 2**20),
        (20000, RLIM_INFINITY, 20000, 20000),  # never lowered
        (256, RLIM_INFINITY, 256, 256),
        (RLIM_INFINITY, RLIM_INFINITY, 256, RLIM_INFINITY),
    ],
)
def test_limit_is_raised_as_far_as_the_system_allows(
    soft: int, hard: int, largest: int, expected: int, refusal: Exception
) -> None:
    limits = FakeLimits(soft, hard, largest, refusal)
    allow_many_files(limits)
    assert limits.getrlimit(RLIMIT_NOFILE) == (expected, hard)


@pytest.mark.parametrize("refusal", REFUSALS, ids=["ValueError", "OSError"])
def test_refused_limit_is_logged(refusal: Exception, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    allow_many_files(FakeLimits(4096, 4096, 4096, refusal))
    assert caplog.messages == []
    allow_many_files(FakeLimits(256, RLIM_INFINITY, 256, refusal))
    assert caplog.messages == [f"the limit of open files stays 256: {refusal}"]


@pytest.mark.parametrize(
    ("soft", "expected"),
    [(10000, 9488), (1025, 513), (1024, 512), (1023, 511), (600, 300), (RLIM_INFINITY, sys.maxsize - 512)],
)
def test_connections_leave_enough_open_files(soft: int, expected: int) -> None:
    assert max_connections(FakeLimits(soft, RLIM_INFINITY, 0, ValueError())) == expected

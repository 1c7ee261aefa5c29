from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from service.files import allow_many_files, max_connections


def set_limit(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


@pytest.fixture(autouse=True)
def limit_of_this_process() -> Iterator[None]:
    """Is what it was, in the end."""
    before, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    set_limit(before)


@pytest.mark.parametrize(("limit", "most"), [(4096, 3584), (1025, 513), (1024, 512), (1023, 511), (600, 300)])
def test_connections_leave_512_files_or_half_of_them_where_there_are_few(limit: int, most: int) -> None:
    set_limit(limit)
    assert max_connections() == most


def test_as_many_files_are_allowed_as_the_process_may_choose() -> None:
    set_limit(600)
    allow_many_files()
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert limit == hard > 600

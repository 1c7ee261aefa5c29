"""Replicas of encoders that a test holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from models import Replica
from tests.support.held_encoder import HeldEncoder, MakeReplica


@pytest.fixture
def make_replica() -> Iterator[MakeReplica]:
    """Makes replicas, and closes them at the end."""
    made: list[tuple[Replica, HeldEncoder]] = []

    def make(encoder: HeldEncoder, name: str = "cpu") -> Replica:
        made.append((Replica(name, lambda: encoder), encoder))  # type: ignore[arg-type,return-value]
        return made[-1][0]

    yield make
    for replica, encoder in made:
        encoder.may_finish.set()
        replica.close()

"""Replicas of encoders that a test holds, and checkpoints on disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from models import Replica
from tests.support.checkpoints import build_model, save
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build_model(), tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build_model(), tmp_path_factory.mktemp("sharded"), shard_size="100KB")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))

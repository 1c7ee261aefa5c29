"""The store of one process, and of two that share a folder: claims, room, leases, eviction."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from models import write_tokens
from service.errors import TooLarge, TooManyRequests
from service.handoff.folder import open_folder, scan
from service.handoff.store import TokenStore
from service.handoff.token_file import TokenFile, file_bytes
from service.metrics import Metrics

SIZE = file_bytes(2, 4, 4)
UUIDS = [f"vs1-{index:064x}" for index in range(40)]


class Stores:
    """Stores of several processes on one folder, with room for ten entries."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.registry = CollectorRegistry()
        self._metrics = Metrics(self.registry, ())

    def open(self, lease_s: float = 60.0) -> TokenStore:
        return TokenStore(self.folder, lease_s, self._metrics)

    @property
    def kept(self) -> list[str]:
        return sorted(file.uuid for file in scan(self.folder) if not file.is_claim)

    @property
    def num_evicted(self) -> float | None:
        return self.registry.get_sample_value("vision_sidecar_handoff_evictions_total")


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    with open_folder(tmp_path, 10 * SIZE):
        yield Stores(tmp_path)


def num_open(folder: Path) -> int:
    """How many files of the folder this process has open."""
    names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(name).startswith(str(folder)) for name in names if os.path.islink(name))


def write(sink: TokenFile, value: float = 0.0) -> None:
    writing = sink.open((2, 4), torch.float32)
    try:
        write_tokens([(writing, torch.full((2, 4), value))])
    finally:
        writing.discard()


def put(store: TokenStore, uuid: str, value: float = 0.0) -> None:
    """Writes an entry as a request does."""
    assert store.claim(uuid)
    try:
        store.reserve([(uuid, SIZE)])
        write(TokenFile(str(store.folder), uuid, (1, 2, 4), "f", store.lease_s), value)
    finally:
        store.release(uuid)


def expire(store: TokenStore, uuid: str, used_at: float = 0.0) -> None:
    path = store.folder / f"{uuid}.safetensors"
    os.utime(path, (used_at, time.time() - 1))


def assert_counted(store: TokenStore) -> None:
    """The numbers are those of the files."""
    files = [file for file in scan(store.folder) if not file.is_claim]
    assert store.num_entries == len(files)
    assert store.used_bytes == sum(file.num_bytes for file in files)


def test_entry_is_found_by_all_processes_and_leased_by_that(stores: Stores) -> None:
    one, two = stores.open(lease_s=5), stores.open(lease_s=500)
    assert one.find(UUIDS[0]) is None
    put(one, UUIDS[0])
    entry = two.find(UUIDS[0])
    assert entry is not None
    assert (entry.uuid, entry.grid_thw, entry.num_tokens, entry.width) == (UUIDS[0], (1, 2, 4), 2, 4)
    [file] = scan(stores.folder)
    assert 490 < file.leased_until - time.time() <= 500
    assert two.leased_bytes == SIZE
    assert_counted(two)


def test_only_one_process_can_claim_an_entry(stores: Stores) -> None:
    one, two = stores.open(), stores.open()
    assert one.claim(UUIDS[0])
    assert not two.claim(UUIDS[0])
    assert not one.claim(UUIDS[0])
    one.release(UUIDS[0])
    assert two.claim(UUIDS[0])


def test_claim_that_ends_without_an_entry_gives_its_room_back(stores: Stores) -> None:
    store = stores.open()
    assert store.claim(UUIDS[0])
    store.reserve([(UUIDS[0], SIZE)])
    assert (store.used_bytes, store.num_entries) == (SIZE, 1)
    store.release(UUIDS[0])
    assert (store.used_bytes, store.num_entries) == (0, 0)
    assert list(stores.folder.glob("*.claim")) == []


def test_waiting_ends_with_the_claim_of_another_process(stores: Stores) -> None:
    one, two = stores.open(), stores.open()
    assert one.claim(UUIDS[0])
    assert one.claim(UUIDS[1])

    async def wait() -> bool:
        waiting = asyncio.create_task(two.wait(UUIDS[:2]))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        one.release(UUIDS[1])
        await asyncio.wait_for(waiting, 5)
        return not done

    assert asyncio.run(wait())


def test_least_recently_used_entries_without_a_lease_are_evicted(stores: Stores) -> None:
    store = stores.open()
    for index in range(10):
        put(store, UUIDS[index])
    for index in range(8):
        expire(store, UUIDS[index], used_at=100 - index)
    put(store, UUIDS[10])
    assert stores.num_evicted == 1
    assert stores.kept == sorted([*UUIDS[:7], *UUIDS[8:11]])
    put(store, UUIDS[11])
    assert stores.num_evicted == 2
    assert stores.kept == sorted([*UUIDS[:6], *UUIDS[8:12]])
    assert_counted(store)


def test_reading_makes_an_entry_recently_used(stores: Stores) -> None:
    store = stores.open(lease_s=0.001)
    for index in range(10):
        put(store, UUIDS[index])
        expire(store, UUIDS[index], used_at=index)
    store.find(UUIDS[0])
    time.sleep(0.01)
    put(store, UUIDS[10])
    assert UUIDS[0] in stores.kept
    assert UUIDS[1] not in stores.kept


def test_memory_of_evicted_entries_is_freed_without_the_lock(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = stores.open(), stores.open()
    for uuid in UUIDS[:10]:
        put(store, uuid)
        expire(store, uuid)
    open_before = num_open(stores.folder)
    closed: list[int] = []
    close = os.close

    def close_while_others_need_the_lock(file: int) -> None:
        if not os.fstat(file).st_nlink:
            with other._ledger.locked():  # would wait for ever
                closed.append(file)
        close(file)

    monkeypatch.setattr(os, "close", close_while_others_need_the_lock)
    assert store.claim(UUIDS[10])
    store.reserve([(UUIDS[10], 2 * SIZE)])
    assert len(closed) == 2
    assert num_open(stores.folder) == open_before


def test_store_full_of_leases_refuses_and_evicts_nothing(stores: Stores) -> None:
    store = stores.open(lease_s=4.5)
    for index in range(10):
        put(store, UUIDS[index])
    expire(store, UUIDS[0])
    assert store.claim(UUIDS[10])
    assert store.claim(UUIDS[11])
    with pytest.raises(TooManyRequests) as caught:
        store.reserve([(UUIDS[10], SIZE), (UUIDS[11], SIZE)])
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, "handoff_full", 5)
    for uuid in UUIDS[10:12]:
        store.release(uuid)
    assert stores.kept == sorted(UUIDS[:10])
    assert_counted(store)


def test_reserved_room_counts_before_the_entry_is_there(stores: Stores) -> None:
    one, two = stores.open(), stores.open()
    for index in range(10):
        assert one.claim(UUIDS[index])
    one.reserve([(uuid, SIZE) for uuid in UUIDS[:10]])
    assert two.claim(UUIDS[10])
    with pytest.raises(TooManyRequests):
        two.reserve([(UUIDS[10], SIZE)])
    one.release(UUIDS[0])
    two.reserve([(UUIDS[10], SIZE)])


def test_more_than_the_whole_store_is_too_large(stores: Stores) -> None:
    store = stores.open()
    assert store.claim(UUIDS[0])
    with pytest.raises(TooLarge) as caught:
        store.reserve([(UUIDS[0], 10 * SIZE + 1)])
    assert caught.value.code == "too_many_tokens"


def test_deleted_entry_is_gone_and_its_room_is_free(stores: Stores) -> None:
    store = stores.open()
    put(store, UUIDS[0])
    assert store.delete(UUIDS[0])
    assert not store.delete(UUIDS[0])
    assert store.find(UUIDS[0]) is None
    assert_counted(store)


def test_entry_deleted_while_it_is_claimed_is_not_counted_twice(stores: Stores) -> None:
    store = stores.open()
    assert store.claim(UUIDS[0])
    store.reserve([(UUIDS[0], SIZE)])
    write(TokenFile(str(store.folder), UUIDS[0], (1, 2, 4), "f", 60))
    assert store.delete(UUIDS[0])
    store.release(UUIDS[0])
    assert (store.used_bytes, store.num_entries) == (0, 0)


@pytest.mark.parametrize(
    "name",
    ["..", "../ledger", ".ledger", UUIDS[0][:-1], f"{UUIDS[0]}\n", UUIDS[0].upper(), f"x{UUIDS[0]}", "\0"],
)
def test_only_a_uuid_becomes_a_path(stores: Stores, name: str) -> None:
    store = stores.open()
    with pytest.raises(FileNotFoundError):
        store.open(name)
    assert not store.delete(name)
    assert (stores.folder / ".ledger").exists()


def test_link_is_not_followed(stores: Stores, tmp_path: Path) -> None:
    target = tmp_path / "secret"
    target.write_text("secret")
    (stores.folder / f"{UUIDS[0]}.safetensors").symlink_to(target)
    with pytest.raises(OSError, match="symbolic"):
        stores.open().open(UUIDS[0])


def test_open_entry_can_be_read_after_it_was_dropped(stores: Stores) -> None:
    store = stores.open()
    put(store, UUIDS[0], 3.0)
    file = store.open(UUIDS[0])
    assert store.delete(UUIDS[0])
    assert len(os.pread(file, 2 * SIZE, 0)) == SIZE
    os.close(file)


def test_entry_that_another_process_damaged_is_dropped(
    stores: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    store = stores.open()
    put(store, UUIDS[0])
    with open(stores.folder / f"{UUIDS[0]}.safetensors", "r+b") as file:
        file.truncate(SIZE - 1)
    assert store.find(UUIDS[0]) is None
    assert stores.kept == []
    assert "dropped" in caplog.text


def test_entry_that_was_found_is_never_evicted_within_its_lease(stores: Stores) -> None:
    finder, writer = stores.open(lease_s=60), stores.open(lease_s=-1)
    uuids = [f"vs1-{index:064x}" for index in range(600)]

    def put_all() -> None:
        for uuid in uuids:
            put(writer, uuid)

    writing = threading.Thread(target=put_all)
    writing.start()
    found: set[str] = set()
    while writing.is_alive() and len(found) < 8:
        found |= {uuid for uuid in stores.kept[:2] if finder.find(uuid) is not None}
    writing.join()
    assert len(found) >= 2
    assert found <= set(stores.kept)
    assert_counted(writer)


def test_entry_that_is_being_evicted_is_not_found(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    finder, writer = stores.open(), stores.open(lease_s=-1)
    for index in range(10):
        put(writer, UUIDS[index])
        os.utime(writer.folder / f"{UUIDS[index]}.safetensors", (index, 1))
    unlink = os.unlink
    found: list[object] = []
    threads: list[threading.Thread] = []

    def unlink_late(path: str) -> None:
        if path.endswith(f"{UUIDS[0]}.safetensors"):
            threads.append(threading.Thread(target=lambda: found.append(finder.find(UUIDS[0]))))
            threads[0].start()
            threads[0].join(0.1)
        unlink(path)

    monkeypatch.setattr(os, "unlink", unlink_late)
    put(writer, UUIDS[10])
    threads[0].join()
    assert found == [None]
    assert UUIDS[0] not in stores.kept

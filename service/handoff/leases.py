"""Leases that are renewed while an LLM server has yet to load the tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from service.handoff.entry import Entry
from service.handoff.store import TokenStore


@contextmanager
def renewed_leases(store: TokenStore | None, entries: Sequence[Entry]) -> Iterator[Callable[[], object]]:
    """Renews the leases of the entries within the block. The yielded function ends that earlier.

    A lease that is no longer renewed still lasts for its full time. `store` may be None without entries.
    """
    if store is None or not entries:
        yield lambda: None
        return
    renewing = asyncio.create_task(_renew(store, {entry.uuid for entry in entries}))
    try:
        yield renewing.cancel
    finally:
        renewing.cancel()


async def _renew(store: TokenStore, uuids: set[str]) -> None:
    while True:
        await asyncio.sleep(store.lease_s / 2)
        for uuid in uuids:
            store.find(uuid)

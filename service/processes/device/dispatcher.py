"""The batches of several API servers on their way to one device and back.

An API server says that images wait, is granted the device's next place in its turn, and forms its batch only
then. Patches come through memory that it shares with the device, whose thread copies them away before it asks
for the next batch. Knows tensors and links; nothing of requests.
"""

from __future__ import annotations

import logging
import math
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from models import BatchResult, DeviceError, EncodeItem, Patches
from service.processes.wire.link import MAX_FILES, Link
from service.processes.wire.memory import SharedMemory
from service.processes.wire.messages import (
    BatchMessage,
    Failure,
    Fault,
    Granted,
    Place,
    Result,
    Wanting,
)

logger = logging.getLogger(__name__)

# With an API server that was granted the place: while the device has work, and while it has none.
_PATIENCE_S, _IDLE_PATIENCE_S = 0.1, 0.01
_ALIGNMENT = 64  # bytes
# A larger embedding gets memory of its own, so that one answer does not keep that of others.
_OWN_MEMORY_BYTES = 2**20


@dataclass(eq=False)
class ServerLinks:
    """One API server, as a device sees it."""

    batches: Link
    results: Link
    memory: SharedMemory | None = None  # for the patches of a batch; there once the model is loaded


class Idleness(Protocol):
    """Tells other devices that this one has nothing to do, and knows of how many others that holds."""

    def set(self, is_idle: bool) -> None: ...

    def count_others(self) -> int: ...


class Dispatcher:
    """`take` is called in the thread that launches; results go out in the one that waits for the device.

    `on_lost` is told of a fault of the device.
    """

    def __init__(
        self,
        clients: Sequence[ServerLinks],
        *,
        on_lost: Callable[[DeviceError], None],
        idleness: Idleness,
    ) -> None:
        self._on_lost = on_lost
        self._idleness = idleness
        self._wanting: deque[ServerLinks] = deque()
        self._granted: dict[ServerLinks, float] = {}  # since when it is to send its batch
        self._taken: deque[tuple[ServerLinks, BatchMessage]] = deque()  # batches that are there
        self._selector = selectors.DefaultSelector()
        for client in clients:
            self._selector.register(client.batches, selectors.EVENT_READ, client)
        self._lock = threading.Lock()
        self._running: set[Future[BatchResult]] = set()
        self._last_progress_at = 0.0
        idleness.set(True)

    def take(self) -> tuple[Sequence[EncodeItem], Future[BatchResult]] | None:
        """The next batch; waits for one. None once no API server is left.

        The patches are there until the next call.
        """
        while not self._taken:
            if not self._selector.get_map():
                return None
            self._listen(self._grant())
        client, batch = self._taken.popleft()
        future: Future[BatchResult] = Future()
        with self._lock:
            if not self._running:
                self._last_progress_at = time.perf_counter()
            self._running.add(future)
            self._idleness.set(False)
        future.add_done_callback(partial(self._finished, client, batch.number))
        return _items(client, batch), future

    def is_stuck(self, timeout_s: float) -> bool:
        """Whether the device has had work for so long and finished none of it."""
        with self._lock:
            return bool(self._running) and self._last_progress_at < time.perf_counter() - timeout_s

    def _grant(self) -> float | None:
        """Grants the place to who has waited longest. Returns for how many seconds others have to wait.

        An API server may be slow to answer. After a while another one gets the place too, and the batch that
        comes second is the next one; not too soon, as what comes later misses a batch that is formed early.
        None has a batch here now, so the memory of each is free.
        """
        if not self._wanting:
            return None
        if self._running and self._idleness.count_others():
            return _IDLE_PATIENCE_S  # others shall have what waits; if they do not come for it, it is ours
        now = time.perf_counter()
        patience_s = _PATIENCE_S if self._running else _IDLE_PATIENCE_S
        rest_s = max(self._granted.values(), default=-math.inf) + patience_s - now
        if rest_s > 0:
            return rest_s
        client = self._wanting.popleft()
        self._granted[client] = now
        with suppress(ConnectionError):  # it is gone, which the next look finds out
            client.batches.send(Granted(self._idleness.count_others()))
        return patience_s if self._wanting else None

    def _listen(self, seconds: float | None) -> None:
        """Notes whose images wait, in the order in which they said so, and batches that have come."""
        for key, _ in self._selector.select(seconds):
            client: ServerLinks = key.data
            try:
                message, _ = client.batches.receive()
            except EOFError:
                self._forget(client)
                continue
            if isinstance(message, Wanting):
                self._wanting.append(client)
                continue
            del self._granted[client]
            if isinstance(message, BatchMessage):
                self._taken.append((client, message))

    def _forget(self, client: ServerLinks) -> None:
        self._selector.unregister(client.batches)
        self._granted.pop(client, None)
        if client in self._wanting:
            self._wanting.remove(client)

    def _finished(self, client: ServerLinks, number: int, future: Future[BatchResult]) -> None:
        with self._lock:
            self._running.discard(future)
            self._idleness.set(not self._running)
            self._last_progress_at = time.perf_counter()
        error = future.exception()
        try:
            if error is None:
                error = _try_to_send(client.results, number, future.result())
            if error is not None:
                client.results.send(Failure(number, Fault.of(error)))
        except ConnectionError:
            pass  # nobody waits any more
        except Exception:
            logger.exception("an API server cannot be told of its batch")
        if isinstance(error, DeviceError):
            self._on_lost(error)


def _items(client: ServerLinks, batch: BatchMessage) -> list[EncodeItem]:
    assert client.memory is not None, "it has no batch before the model is loaded"
    items = []
    start = 0
    for image in batch.images:
        shape = math.prod(image.grid_thw), batch.patch_dim
        pixels = client.memory.tensor(shape, torch.uint8, start)
        items.append(EncodeItem(Patches(pixels, image.grid_thw, image.num_tokens), image.output))
        start += pixels.nbytes
    return items


def _try_to_send(link: Link, number: int, result: BatchResult) -> Exception | None:
    """Returns what a result failed with that cannot be sent: there may be no memory or no files for it."""
    try:
        _send_result(link, number, result)
    except ConnectionError:
        raise
    except Exception as error:
        return error
    return None


def _send_result(link: Link, number: int, result: BatchResult) -> None:
    places, sizes = place(result.embeddings)
    memories: list[SharedMemory] = []
    try:
        memories += map(SharedMemory.create, sizes)
        for embedding, there in zip(result.embeddings, places, strict=True):
            memories[there.file].tensor(there.shape, there.dtype, there.offset).copy_(embedding)
        message = Result(
            number, tuple(sizes), tuple(places), result.stats, result.started_at, result.finished_at
        )
        link.send(message, [memory.file for memory in memories])
    finally:
        for memory in memories:
            memory.close_file()


def place(embeddings: Sequence[torch.Tensor]) -> tuple[list[Place], list[int]]:
    """Where each tensor goes, and how large the files are: small ones share the first."""
    places: list[Place] = []
    sizes = [_ALIGNMENT]
    for embedding in embeddings:
        num_bytes = embedding.nbytes
        file = 0
        if num_bytes >= _OWN_MEMORY_BYTES and len(sizes) < MAX_FILES:
            file = len(sizes)
            sizes.append(0)
        places.append(Place(file, sizes[file], tuple(embedding.shape), embedding.dtype))
        sizes[file] += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    return places, sizes

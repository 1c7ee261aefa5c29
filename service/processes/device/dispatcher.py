"""The batches of several API servers on their way to one device and back.

An API server says that images wait. The device grants its next place to each API server in turn, and only
then does the API server form a batch. Patches come through shared memory; the thread of the device copies
them before it takes the next batch. Knows tensors and links; knows nothing of requests.
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

# How long an API server may take to send its batch: while the device has work, and while it is idle.
_PATIENCE_S, _IDLE_PATIENCE_S = 0.1, 0.01
_ALIGNMENT = 64  # bytes
# A larger embedding gets memory of its own, so that one answer does not keep the memory of others.
_OWN_MEMORY_BYTES = 2**20


@dataclass(eq=False)
class ServerLinks:
    """The links and the memory of one API server."""

    batches: Link
    results: Link
    memory: SharedMemory | None = None  # for the patches of a batch; set once the model is loaded


class Idleness(Protocol):
    """Tells other devices whether this one is idle, and counts the others that are."""

    def set(self, is_idle: bool) -> None: ...

    def count_others(self) -> int: ...


class Dispatcher:
    """The thread that launches batches calls `take`; the thread that waits for the device sends the results.

    `on_lost` is called with a fault of the device.
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
        self._granted: dict[ServerLinks, float] = {}  # when; it has not sent its batch yet
        self._taken: deque[tuple[ServerLinks, BatchMessage]] = deque()  # batches that have arrived
        self._selector = selectors.DefaultSelector()
        for client in clients:
            self._selector.register(client.batches, selectors.EVENT_READ, client)
        self._lock = threading.Lock()
        self._running: set[Future[BatchResult]] = set()
        self._last_progress_at = 0.0
        idleness.set(True)

    def take(self) -> tuple[Sequence[EncodeItem], Future[BatchResult]] | None:
        """Waits for the next batch and returns it. Returns None once no API server is left.

        The patches stay in memory until the next call.
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
        """Returns whether the device has had work for `timeout_s` and finished none of it."""
        with self._lock:
            return bool(self._running) and self._last_progress_at < time.perf_counter() - timeout_s

    def _grant(self) -> float | None:
        """Grants the place to the API server that has waited longest. Returns how long the next one waits.

        An API server may be slow to answer. After a while a second one gets the place too, and the batch that
        arrives second is run next. This does not happen too soon, because images that arrive later miss a
        batch that is formed early. No batch is here now, so the memory of every API server is free.
        """
        if not self._wanting:
            return None
        if self._running and self._idleness.count_others():
            return _IDLE_PATIENCE_S  # idle devices come first; if they take nothing, this one does
        now = time.perf_counter()
        patience_s = _PATIENCE_S if self._running else _IDLE_PATIENCE_S
        rest_s = max(self._granted.values(), default=-math.inf) + patience_s - now
        if rest_s > 0:
            return rest_s
        client = self._wanting.popleft()
        self._granted[client] = now
        with suppress(ConnectionError):  # it has exited, which `_listen` will see
            client.batches.send(Granted(self._idleness.count_others()))
        return patience_s if self._wanting else None

    def _listen(self, seconds: float | None) -> None:
        """Receives messages: API servers whose images wait, in their order, and batches."""
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
            pass  # the API server has exited
        except Exception:
            logger.exception("an API server cannot be told of its batch")
        if isinstance(error, DeviceError):
            self._on_lost(error)


def _items(client: ServerLinks, batch: BatchMessage) -> list[EncodeItem]:
    assert client.memory is not None, "an API server has no batch before the model is loaded"
    items = []
    start = 0
    for image in batch.images:
        shape = math.prod(image.grid_thw), batch.patch_dim
        pixels = client.memory.tensor(shape, torch.uint8, start)
        patches = Patches(pixels, image.grid_thw, image.num_tokens)
        items.append(EncodeItem(patches, image.output, image.sink))
        start += pixels.nbytes
    return items


def _try_to_send(link: Link, number: int, result: BatchResult) -> Exception | None:
    """Sends a result. Returns the error if there is no memory or no file for it."""
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
    """Returns the place of each tensor, and the sizes of the files. Small tensors share the first file."""
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

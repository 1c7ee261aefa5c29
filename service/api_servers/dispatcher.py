"""The batches of several API servers on their way to one device and back.

An API server says that images wait, is granted the device's next place in its turn, and forms its batch only
then. Patches come through one piece of shared memory, because the device's thread copies them away before it
asks for the next batch. Knows tensors and links; nothing of requests.
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
from dataclasses import dataclass
from functools import partial

import torch

from models import BatchResult, DeviceError, EncodeItem, Patches
from service.api_servers.link import MAX_FILES, Link
from service.api_servers.memory import SharedMemory
from service.api_servers.messages import (
    Batch,
    Failure,
    Fault,
    Granted,
    Place,
    Result,
    Wanting,
)

logger = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes
# A larger embedding gets memory of its own, so that one answer does not keep that of others.
_OWN_MEMORY_BYTES = 2**20


@dataclass(frozen=True, eq=False)
class Client:
    """One API server, as a device sees it."""

    batches: Link
    results: Link


class Dispatcher:
    """`take` is called in the thread that launches; results go out in the one that waits for the device.

    `on_lost` is told of a fault of the device. An API server that was granted a place has `timeout_s` for its
    batch.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        memory: SharedMemory,
        *,
        timeout_s: float,
        on_lost: Callable[[DeviceError], None],
    ) -> None:
        self._patches = memory.bytes
        self._on_lost = on_lost
        self._wanting: deque[Client] = deque()
        self._selector = selectors.DefaultSelector()
        for client in clients:
            client.batches.socket.settimeout(timeout_s)
            self._selector.register(client.batches, selectors.EVENT_READ, client)
        self._lock = threading.Lock()
        self._running: set[Future[BatchResult]] = set()
        self._got_on_at = 0.0

    def take(self) -> tuple[Sequence[EncodeItem], Future[BatchResult]] | None:
        """The next batch; waits for one. None once no API server is left."""
        while self._selector.get_map():
            self._listen()
            batch = self._ask(self._wanting.popleft()) if self._wanting else None
            if batch is not None:
                return batch
        return None

    def is_stuck(self, timeout_s: float) -> bool:
        """Whether the device has had work for so long and finished none of it."""
        with self._lock:
            return bool(self._running) and self._got_on_at < time.perf_counter() - timeout_s

    @property
    def is_idle(self) -> bool:
        """Nothing runs."""
        return not self._running

    def _listen(self) -> None:
        """Notes whose images wait, in the order in which they said so; waits for one if there is none."""
        for key, _ in self._selector.select(0 if self._wanting else None):
            client: Client = key.data
            try:
                message, _ = client.batches.receive()
            except EOFError:
                self._selector.unregister(client.batches)
                continue
            assert isinstance(message, Wanting), f"not asked for: {message!r}"
            self._wanting.append(client)

    def _ask(self, client: Client) -> tuple[Sequence[EncodeItem], Future[BatchResult]] | None:
        try:
            client.batches.send(Granted())
            message, _ = client.batches.receive()
        except (EOFError, ConnectionError):
            return None  # it is gone, which the next look finds out
        if not isinstance(message, Batch):
            return None
        future: Future[BatchResult] = Future()
        with self._lock:
            if not self._running:
                self._got_on_at = time.perf_counter()
            self._running.add(future)
        future.add_done_callback(partial(self._finished, client, message.number))
        return self._items(message), future

    def _items(self, batch: Batch) -> list[EncodeItem]:
        items = []
        start = 0
        for image in batch.images:
            rows = math.prod(image.grid_thw)
            end = start + rows * batch.patch_dim
            pixels = self._patches[start:end].view(rows, batch.patch_dim)
            items.append(EncodeItem(Patches(pixels, image.grid_thw, image.num_tokens), image.output))
            start = end
        return items

    def _finished(self, client: Client, number: int, future: Future[BatchResult]) -> None:
        with self._lock:
            self._running.discard(future)
            self._got_on_at = time.perf_counter()
        error = future.exception()
        try:
            if error is None:
                error = _try_to_send(client.results, number, future.result())
            if error is not None:
                client.results.send(Failure(number, Fault.of(error)))
        except ConnectionError:
            pass  # nobody waits any more
        if isinstance(error, DeviceError):
            self._on_lost(error)


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
        num_bytes = embedding.numel() * embedding.element_size()
        file = 0
        if num_bytes >= _OWN_MEMORY_BYTES and len(sizes) < MAX_FILES:
            file = len(sizes)
            sizes.append(0)
        places.append(Place(file, sizes[file], tuple(embedding.shape), embedding.dtype))
        sizes[file] += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    return places, sizes

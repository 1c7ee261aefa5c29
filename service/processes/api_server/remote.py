"""A device of another process, as the queue and the engine of an API server see it.

`service.processes.device.dispatcher` is the other end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count

import torch

from models import BatchResult, DeviceError, EncodeItem
from service.processes.wire.link import Link
from service.processes.wire.memory import SharedMemory
from service.processes.wire.messages import (
    BatchImage,
    BatchMessage,
    EncoderFacts,
    Failure,
    Granted,
    Nothing,
    Result,
    Wanting,
)
from service.queue.batcher import DeviceQueue


class RemoteReplica:
    """Takes the place of a `Replica` that is in another process."""

    def __init__(self, name: str, batches: Link, results: Link) -> None:
        self.name = name
        self.ready: Future[EncoderFacts] = Future()
        self._batches = batches
        self._results = results
        self._numbers = count()
        self._running: dict[int, Future[BatchResult]] = {}
        self._is_closed = False

    def loaded(self, encoder: EncoderFacts, memory: SharedMemory) -> None:
        """The other process has loaded the model. `memory` is for the patches of a batch."""
        self._patches = memory.bytes
        self.ready.set_result(encoder)

    def serve(self, queue: DeviceQueue) -> Future[None]:
        """Sends the batches of the queue to the other process, until the queue has no more.

        The future ends with the error of the queue or of the link to the other process, if there was one.
        """
        serving: Future[None] = Future()
        for work, name in ((self._send, "batches"), (self._receive, "results")):
            threading.Thread(
                target=work, args=(queue, serving), name=f"{name}-{self.name}", daemon=True
            ).start()
        return serving

    def _send(self, queue: DeviceQueue, serving: Future[None]) -> None:
        try:
            self.ready.result()
            while queue.wait():
                self._batches.send(Wanting())
                message, _ = self._batches.receive()
                assert isinstance(message, Granted), f"unexpected message {message!r}"
                self._batches.send(self._next(queue, message.num_idle_others))
        except BaseException as error:
            if not self._is_closed:
                serving.set_exception(error)
                return
        serving.set_result(None)

    def _next(self, queue: DeviceQueue, num_idle_others: int) -> BatchMessage | Nothing:
        batch = queue.poll(num_idle_others)
        return Nothing() if batch is None else self._write(*batch)

    def _write(self, items: Sequence[EncodeItem], future: Future[BatchResult]) -> BatchMessage | Nothing:
        patches = [item.patches.pixels for item in items]
        num_rows, patch_dim = sum(len(rows) for rows in patches), patches[0].shape[1]
        try:
            torch.cat(patches, out=self._patches[: num_rows * patch_dim].view(num_rows, patch_dim))
        except Exception as error:
            future.set_exception(error)
            return Nothing()
        number = next(self._numbers)
        self._running[number] = future
        images = tuple(
            BatchImage(item.patches.grid_thw, item.patches.num_tokens, item.output, item.sink)
            for item in items
        )
        return BatchMessage(number, images, patch_dim)

    def _receive(self, queue: DeviceQueue, serving: Future[None]) -> None:
        try:
            while True:
                message, files = self._results.receive()
                future = self._running.pop(message.number)
                if isinstance(message, Failure):
                    future.set_exception(message.fault.error())
                else:
                    _settle(future, message, files)
                del future  # it holds the results
        except Exception as error:  # the link is closed, or a message could not be read
            while self._running:
                _, future = self._running.popitem()
                future.set_exception(DeviceError(self.name, error))

    def close(self) -> None:
        """Ends the threads, once the queue has no more batches."""
        self._is_closed = True
        self._batches.close()
        self._results.close()


@dataclass(frozen=True)
class RemoteReplicas:
    """Takes the place of a `ReplicaGroup`."""

    replicas: Sequence[RemoteReplica]


def _settle(future: Future[BatchResult], message: Result, files: Sequence[int]) -> None:
    """Sets the result, or the error of reading it: the process may have no files left."""
    try:
        result = _result(message, files)
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _result(message: Result, files: Sequence[int]) -> BatchResult:
    try:
        memories = [SharedMemory(file, size) for file, size in zip(files, message.file_sizes, strict=True)]
    finally:
        for file in files:
            os.close(file)
    embeddings = tuple(
        memories[place.file].tensor(place.shape, place.dtype, place.offset) for place in message.embeddings
    )
    return BatchResult(embeddings, message.stats, message.started_at, message.finished_at)

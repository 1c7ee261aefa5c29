"""A `VisionEncoder` with the threads that own its device, and several of them as one.

Loading, capturing and launching happen in one thread, because inference mode, the current device and the
current stream belong to a thread. A second thread waits for what was launched, so that the next batch is
launched while one runs. Knows nothing of requests.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from models.encoder import VisionEncoder
from models.errors import DeviceError
from models.load_balance import get_load_balance_assignment
from models.outputs import BatchResult, EncodeItem
from models.readback import RunningBatch

MAX_LAUNCHED = 2  # batches: one runs, one waits behind it on the device


class Queue(Protocol):
    """Where a replica's batches come from."""

    def take(self) -> tuple[Sequence[EncodeItem], Future[BatchResult]] | None:
        """The images of the next batch, and the future that its result goes to. None: no more."""


class Replica:
    """One device. Batches run one after the other, in the order in which they were submitted.

    A fault of the device itself ends a batch with `DeviceError`. Statistics carry the replica's name.
    """

    def __init__(self, name: str, load: Callable[[], VisionEncoder]) -> None:
        self.name = name
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix=f"replica-{name}")
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix=f"results-{name}")
        self._places = threading.Semaphore(MAX_LAUNCHED)
        self.ready: Future[VisionEncoder] = self._launcher.submit(load)

    def submit(self, items: Sequence[EncodeItem]) -> Future[BatchResult]:
        """Encodes the items behind all that was submitted before. Raises `RuntimeError` once closed.

        A future that is cancelled before its batch is launched leaves the batch out.
        """
        future: Future[BatchResult] = Future()
        self._launcher.submit(self._launch_in_turn, items, future)
        return future

    def serve(self, queue: Queue) -> Future[None]:
        """Encodes what the queue gives, in the launching thread, until it gives None.

        It is asked when the device has a place for a batch, and waits until there is one. The future ends
        with what the queue or the thread failed with.
        """
        return self._launcher.submit(self._serve, queue)

    def _serve(self, queue: Queue) -> None:
        self.ready.result()
        while True:
            self._places.acquire()
            batch = queue.take()
            if batch is None:
                self._places.release()
                return
            self._launch(*batch)
            del batch  # or its patches and results, which may be large, stay until the next one comes

    def _launch_in_turn(self, items: Sequence[EncodeItem], future: Future[BatchResult]) -> None:
        self._places.acquire()
        self._launch(items, future)

    def _launch(self, items: Sequence[EncodeItem], future: Future[BatchResult]) -> None:
        """Takes a place over, which is free again once the device has finished."""
        running: RunningBatch | None = None
        try:
            if future.set_running_or_notify_cancel():
                running = self.ready.result().launch(items)
        except BaseException as error:
            self._fail(future, error)
        if running is None:
            self._places.release()
        else:
            self._finisher.submit(self._finish, running, future)

    def _finish(self, running: RunningBatch, future: Future[BatchResult]) -> None:
        try:
            try:
                running.wait_for_device()
            finally:
                self._places.release()  # the device has room for the next batch while results are collected
            result = running.collect()
        except BaseException as error:
            self._fail(future, error)
        else:
            stats = tuple(replace(stats, device=self.name) for stats in result.stats)
            future.set_result(replace(result, stats=stats))

    def _fail(self, future: Future[BatchResult], error: BaseException) -> None:
        """Ends a batch with what its launch or its end raised, which goes on to others without its locals."""
        if self.ready.exception() is None:  # else it is the error of loading, whose frames may be in use
            _clear_locals(error)
            error = self._blamed(error)
        future.set_exception(error)

    def _blamed(self, error: BaseException) -> BaseException:
        """`DeviceError` for a fault of the device, which libraries may have raised as something else."""
        try:
            self.ready.result().check_device()
        except torch.AcceleratorError as fault:
            return DeviceError(self.name, fault)
        return DeviceError(self.name, error) if isinstance(error, torch.AcceleratorError) else error

    def close(self) -> None:
        """Ends the threads once all that was submitted has finished."""
        self._launcher.shutdown(wait=True)
        self._finisher.shutdown(wait=True)


def _clear_locals(error: BaseException) -> None:
    """Lets go of what a failed step allocated, which the images' next attempt needs.

    The frame that caught the error holds the batch's future, and so the error itself: it is left out.
    """
    chain = [error]
    for link in chain:
        traceback.clear_frames(link.__traceback__)
        others = (link.__cause__, link.__context__)
        chain.extend(other for other in others if other is not None and other not in chain)
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


class ReplicaGroup:
    """Several devices that hold the same model. One call's images are shared out among them."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        assert replicas, "a group has at least one replica"
        self.replicas = tuple(replicas)
        self._lock = threading.Lock()
        self._loads = [0] * len(replicas)  # input rows submitted to each replica and not finished
        self._lost: set[int] = set()  # replicas whose device failed

    def submit(self, items: Sequence[EncodeItem]) -> Future[BatchResult]:
        """Encodes the items where least is to be done. If a share fails, the call fails, after the others.

        A call that one replica takes can be cancelled until it is launched; one that was shared out cannot.
        """
        sizes = [len(item.patches.pixels) for item in items]
        parts = [
            (share, self._submit_share(replica, [items[index] for index in share], load))
            for replica, share, load in self._assign(sizes)
        ]
        if len(parts) == 1:
            return parts[0][1]
        gathering = _Gathering(len(items), len(parts))
        for share, part in parts:
            part.add_done_callback(partial(gathering.take, share))
        return gathering.future

    def _assign(self, sizes: Sequence[int]) -> list[tuple[int, tuple[int, ...], int]]:
        """Who takes what, as replica, indices and rows. A lost device gets nothing while another is left."""
        with self._lock:
            everyone = range(len(self.replicas))
            able = [replica for replica in everyone if replica not in self._lost] or [*everyone]
            loads = [self._loads[replica] for replica in able]
            shares = get_load_balance_assignment(sizes, len(able), loads)
            taken = [
                (replica, share, sum(sizes[index] for index in share))
                for replica, share in zip(able, shares, strict=True)
                if share
            ]
            for replica, _, load in taken:
                self._loads[replica] += load
            return taken or [(able[0], (), 0)]

    def _submit_share(self, replica: int, items: Sequence[EncodeItem], load: int) -> Future[BatchResult]:
        try:
            part = self.replicas[replica].submit(items)
        except RuntimeError as error:  # it is closed
            part = Future()
            part.set_exception(error)
        part.add_done_callback(partial(self._ended, replica, load))
        return part

    def _ended(self, replica: int, load: int, part: Future[BatchResult]) -> None:
        with self._lock:
            self._loads[replica] -= load
            if not part.cancelled() and isinstance(part.exception(), DeviceError):
                self._lost.add(replica)

    def close(self) -> None:
        """Ends every replica once what was submitted has finished."""
        for replica in self.replicas:
            replica.close()


class _Gathering:
    """The shares of one call on their way back."""

    def __init__(self, num_items: int, num_shares: int) -> None:
        self.future: Future[BatchResult] = Future()
        self.future.set_running_or_notify_cancel()
        self._lock = threading.Lock()
        self._missing = num_shares
        self._embeddings: list[torch.Tensor | None] = [None] * num_items
        self._parts: list[BatchResult] = []
        self._error: BaseException | None = None

    def take(self, share: Sequence[int], part: Future[BatchResult]) -> None:
        with self._lock:
            self._missing -= 1
            error = part.exception()
            if error is not None:
                if self._error is None or isinstance(error, DeviceError):  # the one that matters to others
                    self._error = error
            else:
                result = part.result()
                self._parts.append(result)
                for index, embedding in zip(share, result.embeddings, strict=True):
                    self._embeddings[index] = embedding
            last = self._missing == 0
        if last:
            self._end()

    def _end(self) -> None:
        if self._error is not None:
            self.future.set_exception(self._error)
            return
        embeddings = tuple(embedding for embedding in self._embeddings if embedding is not None)
        assert len(embeddings) == len(self._embeddings), "every share has come back"
        self.future.set_result(
            BatchResult(
                embeddings,
                tuple(stats for part in self._parts for stats in part.stats),
                min(part.started_at for part in self._parts),
                max(part.finished_at for part in self._parts),
            )
        )

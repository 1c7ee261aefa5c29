"""A `VisionEncoder` with the threads that own its device.

One thread loads, captures and launches, because inference mode, the current device and the current stream
belong to a thread. A second thread waits for the results, so that the next batch is launched while one runs.
Knows nothing of requests.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

import torch

from models.encoder import VisionEncoder
from models.errors import DeviceError
from models.outputs import BatchResult, EncodeItem
from models.readback import RunningBatch

MAX_LAUNCHED = 2  # batches: one runs, one waits behind it on the device


class Queue(Protocol):
    """The source of a replica's batches."""

    def take(self) -> tuple[Sequence[EncodeItem], Future[BatchResult]] | None:
        """Waits for the next batch. Returns its images and the future for its result, or None at the end."""


class Replica:
    """One device. Batches run one after the other, in the order in which they were submitted.

    If the device itself fails, its batches end with `DeviceError`. Statistics have the replica's name.
    """

    def __init__(self, name: str, load: Callable[[], VisionEncoder]) -> None:
        self.name = name
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix=f"replica-{name}")
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix=f"results-{name}")
        self._places = threading.Semaphore(MAX_LAUNCHED)
        self.ready: Future[VisionEncoder] = self._launcher.submit(load)

    def submit(self, items: Sequence[EncodeItem]) -> Future[BatchResult]:
        """Encodes the items after everything that was submitted before. Raises `RuntimeError` once closed.

        If the future is cancelled before the batch is launched, the batch does not run.
        """
        future: Future[BatchResult] = Future()
        self._launcher.submit(self._launch_in_turn, items, future)
        return future

    def serve(self, queue: Queue) -> Future[None]:
        """Encodes the batches of a queue, in the launching thread, until `take` returns None.

        `take` is called only when the device has a place for a batch. The returned future ends when the queue
        does, or with the error of `take` or of loading. The error of a batch does not end it.
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
            del batch  # its patches and results may be large, and would stay until the next batch comes

    def _launch_in_turn(self, items: Sequence[EncodeItem], future: Future[BatchResult]) -> None:
        self._places.acquire()
        self._launch(items, future)

    def _launch(self, items: Sequence[EncodeItem], future: Future[BatchResult]) -> None:
        """Launches a batch. The caller has acquired a place; it is released once the device has finished."""
        running: RunningBatch | None = None
        try:
            if future.set_running_or_notify_cancel():
                running = self.ready.result().launch(items)
        except BaseException as error:  # a future that never ends would block its caller
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
                self._places.release()  # the device can take the next batch while results are collected
            result = running.collect()
        except BaseException as error:  # as in `_launch`
            self._fail(future, error)
        else:
            stats = tuple(replace(stats, device=self.name) for stats in result.stats)
            future.set_result(replace(result, stats=stats))

    def _fail(self, future: Future[BatchResult], error: BaseException) -> None:
        """Ends a batch with an error, after the locals of the error's frames are cleared."""
        if self.ready.exception() is None:  # an error of loading is shared, and its frames may still run
            _clear_locals(error)
            error = self._as_device_error(error)
        future.set_exception(error)

    def _as_device_error(self, error: BaseException) -> BaseException:
        """Returns `DeviceError` if the device has failed, else `error`.

        The device is asked, because libraries raise its faults as other errors too.
        """
        try:
            self.ready.result().check_device()
        except torch.AcceleratorError as fault:
            return DeviceError(self.name, fault)
        return DeviceError(self.name, error) if isinstance(error, torch.AcceleratorError) else error

    def close(self) -> None:
        """Ends the threads once everything that was submitted has finished."""
        self._launcher.shutdown(wait=True)
        self._finisher.shutdown(wait=True)


def _clear_locals(error: BaseException) -> None:
    """Frees the memory that a failed step allocated, because the images need it if they run again.

    The first frame caught the error and holds the batch's future, which holds the error. It is removed from
    the traceback.
    """
    chain = [error]
    for link in chain:
        traceback.clear_frames(link.__traceback__)
        others = (link.__cause__, link.__context__)
        chain.extend(other for other in others if other is not None and other not in chain)
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next

"""Several replicas of the same model as one. Knows nothing of requests."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import torch

from models.errors import DeviceError
from models.load_balance import get_load_balance_assignment
from models.outputs import BatchResult, EncodeItem
from models.replica import Replica


class ReplicaGroup:
    """Shares the images of one call among the devices."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        assert replicas, "a group has at least one replica"
        self.replicas = tuple(replicas)
        self._lock = threading.Lock()
        self._loads = [0] * len(replicas)  # input rows submitted to each replica and not finished
        self._lost: set[int] = set()  # replicas whose device failed

    def submit(self, items: Sequence[EncodeItem]) -> Future[BatchResult]:
        """Encodes the items on the devices with the least load. If a share fails, the call fails.

        The future ends after all shares have. A call with one share can be cancelled until it is launched,
        others cannot.
        """
        sizes = [len(item.patches.pixels) for item in items]
        shares = [
            (indices, self._submit_share(replica, [items[index] for index in indices], load))
            for replica, indices, load in self._assign(sizes)
        ]
        if len(shares) == 1:
            return shares[0][1]
        call = _SharedCall(len(items), len(shares))
        for indices, share in shares:
            share.add_done_callback(partial(call.add_share, indices))
        return call.future

    def _assign(self, sizes: Sequence[int]) -> list[tuple[int, tuple[int, ...], int]]:
        """Returns replica, indices and rows of each share.

        A lost device gets no share, unless all devices are lost.
        """
        with self._lock:
            everyone = range(len(self.replicas))
            able = [replica for replica in everyone if replica not in self._lost] or [*everyone]
            loads = [self._loads[replica] for replica in able]
            assignment = get_load_balance_assignment(sizes, len(able), loads)
            shares = [
                (replica, indices, sum(sizes[index] for index in indices))
                for replica, indices in zip(able, assignment, strict=True)
                if indices
            ]
            for replica, _, load in shares:
                self._loads[replica] += load
            return shares or [(able[0], (), 0)]

    def _submit_share(self, replica: int, items: Sequence[EncodeItem], load: int) -> Future[BatchResult]:
        try:
            share = self.replicas[replica].submit(items)
        except RuntimeError as error:  # the replica is closed
            share = Future()
            share.set_exception(error)
        share.add_done_callback(partial(self._share_ended, replica, load))
        return share

    def _share_ended(self, replica: int, load: int, share: Future[BatchResult]) -> None:
        with self._lock:
            self._loads[replica] -= load
            if not share.cancelled() and isinstance(share.exception(), DeviceError):
                self._lost.add(replica)

    def close(self) -> None:
        """Ends every replica once everything that was submitted has finished."""
        for replica in self.replicas:
            replica.close()


class _SharedCall:
    """A call whose images are shared among replicas. Its future ends when the last share has."""

    def __init__(self, num_items: int, num_shares: int) -> None:
        self.future: Future[BatchResult] = Future()
        self.future.set_running_or_notify_cancel()
        self._lock = threading.Lock()
        self._num_missing = num_shares
        self._embeddings: list[torch.Tensor | None] = [None] * num_items
        self._results: list[BatchResult] = []
        self._error: BaseException | None = None

    def add_share(self, indices: Sequence[int], share: Future[BatchResult]) -> None:
        """Called when a share has ended. `indices` are the places of its images in the call."""
        with self._lock:
            self._num_missing -= 1
            error = share.exception()
            if error is not None:
                if self._error is None or isinstance(error, DeviceError):  # a lost device is the graver error
                    self._error = error
            else:
                result = share.result()
                self._results.append(result)
                for index, embedding in zip(indices, result.embeddings, strict=True):
                    self._embeddings[index] = embedding
            complete = self._num_missing == 0
        if complete:
            self._end()

    def _end(self) -> None:
        if self._error is not None:
            self.future.set_exception(self._error)
            return
        embeddings = tuple(embedding for embedding in self._embeddings if embedding is not None)
        assert len(embeddings) == len(self._embeddings), "every image has an embedding"
        self.future.set_result(
            BatchResult(
                embeddings,
                tuple(stats for result in self._results for stats in result.stats),
                min(result.started_at for result in self._results),
                max(result.finished_at for result in self._results),
            )
        )

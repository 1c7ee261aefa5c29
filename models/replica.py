"""A `VisionEncoder` with the one thread that owns its device: submit a batch, get a future.

Loading, capturing and serving all happen in that thread, because inference mode, the current device and the
current stream belong to a thread. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from models.encoder import VisionEncoder
from models.outputs import BatchResult, EncodeItem


class Replica:
    """One device. Batches run one after the other, in the order in which they were submitted."""

    def __init__(self, name: str, load: Callable[[], VisionEncoder]) -> None:
        self.name = name
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"replica-{name}")
        self.ready: Future[VisionEncoder] = self._thread.submit(load)

    def submit(self, items: Sequence[EncodeItem]) -> Future[BatchResult]:
        """Encodes the items behind all that was submitted before. Raises `RuntimeError` once closed."""
        return self._thread.submit(self._run, items)

    def _run(self, items: Sequence[EncodeItem]) -> BatchResult:
        return self.ready.result().run(items)

    def close(self) -> None:
        """Ends the thread once all that was submitted has finished."""
        self._thread.shutdown(wait=True)

"""What joins the app to the models: loading, being ready, handing batches on, failing, closing.

Knows the life cycle of the replicas and the metrics of their devices; nothing of HTTP or images.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from enum import Enum
from functools import partial

from models import BatchResult, DeviceError, EncodeItem, ModelError, ReplicaGroup, VisionEncoder
from service.dtypes import dtype_name
from service.errors import ApiError, Unavailable
from service.metrics import Metrics

logger = logging.getLogger(__name__)


class State(Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Engine:
    """The replicas as the app sees them, from before their model is loaded to their end."""

    def __init__(
        self, start_replicas: Callable[[], ReplicaGroup], metrics: Metrics, *, model_name: str, version: str
    ) -> None:
        self._start_replicas = start_replicas
        self._metrics = metrics
        self._model_name = model_name
        self._version = version
        self._group: ReplicaGroup | None = None
        self._encoder: VisionEncoder | None = None
        self._lock = threading.Lock()  # of `state` and `_loading`, which the replicas' threads change too
        self._loading: set[str] = set()
        self.state = State.LOADING
        self.num_admitted = 0
        self._batches: set[Future[BatchResult]] = set()  # submitted and not ended

    @property
    def encoder(self) -> VisionEncoder:
        """A loaded encoder, for what it says of itself. Its device belongs to its replica's thread."""
        assert self._encoder is not None, "the model is not loaded yet"
        return self._encoder

    @property
    def devices(self) -> tuple[str, ...]:
        """The replicas' names, which metrics have as `device`."""
        return tuple(replica.name for replica in self._group.replicas) if self._group else ()

    def start(self) -> None:
        """Starts the replicas' threads, which load the model."""
        try:
            self._group = group = self._start_replicas()
        except ModelError as error:
            self._on_load_failed(error)
            return
        self._loading = set(self.devices)
        for device in self.devices:
            self._metrics.add_device(device)
        for replica in group.replicas:
            replica.ready.add_done_callback(partial(self._on_loaded, replica.name))

    def _on_loaded(self, device: str, ready: Future[VisionEncoder]) -> None:
        """Runs in the replica's thread."""
        error = ready.exception()
        if error is not None:
            self._on_load_failed(error)
            return
        encoder = ready.result()
        self._metrics.set_graphs(
            device,
            sorted(encoder.graphs.graphs),
            memory_bytes=encoder.graphs.memory_bytes,
            capture_seconds=encoder.graphs.capture_seconds,
        )
        self._metrics.set_device_up(device, True)
        with self._lock:
            self._loading.remove(device)
            is_last = not self._loading
        if is_last:
            self._on_all_loaded(encoder)

    def _on_all_loaded(self, encoder: VisionEncoder) -> None:
        self._encoder = encoder
        self._metrics.set_info(
            model=self._model_name,
            fingerprint=encoder.fingerprint,
            dtype=dtype_name(encoder.dtype),
            attn_backend=encoder.attn_backend,
            version=self._version,
        )
        if self._enter(State.READY, [State.LOADING]):
            logger.info("ready: model %s on %s", self._model_name, ", ".join(self.devices))

    def _on_load_failed(self, error: BaseException) -> None:
        if not self._enter(State.FAILED, [State.LOADING, State.DRAINING]):
            return  # another replica has said it
        trace = None if isinstance(error, ModelError) else error
        logger.error("cannot load model %s: %s", self._model_name, error, exc_info=trace)

    def check_alive(self) -> None:
        """Raises `Unavailable` once restarting the process is the only help."""
        if self.state is State.FAILED:
            raise Unavailable("the device failed; the server must be restarted", code="device_failed")

    def check_loaded(self) -> None:
        """Raises `Unavailable` unless `encoder` can be asked."""
        self.check_alive()
        if self._encoder is None:
            raise Unavailable("the model is still being loaded", code="not_ready")

    def check_ready(self) -> None:
        """Raises `Unavailable` unless new requests are taken."""
        self.check_loaded()
        if self.state is State.DRAINING:
            raise Unavailable("the server is shutting down", code="draining")

    @contextmanager
    def admit(self) -> Iterator[None]:
        """One request, which will be finished even if the server is told to stop meanwhile.

        Raises `Unavailable` where it is not taken, and in place of whatever a lost device makes it fail with.
        """
        self.check_ready()
        self.num_admitted += 1
        try:
            yield
        except ApiError:
            raise
        except Exception as error:
            if isinstance(error, DeviceError):
                self._lose_device(error)
            self.check_alive()
            raise
        finally:
            self.num_admitted -= 1

    def submit(self, items: Sequence[EncodeItem]) -> Future[BatchResult]:
        """Hands a batch to the devices."""
        assert self._group is not None, "nothing is submitted before the model is loaded"
        batch = self._group.submit(items)
        self._batches.add(batch)
        batch.add_done_callback(self._on_batch)
        return batch

    def _on_batch(self, batch: Future[BatchResult]) -> None:
        """Runs in a replica's thread."""
        self._batches.discard(batch)
        if batch.cancelled():
            return
        error = batch.exception()
        if error is None:
            for stats in batch.result().stats:
                self._metrics.observe_batch(stats)
        elif isinstance(error, DeviceError):
            self._lose_device(error)

    def _lose_device(self, error: DeviceError) -> None:
        """One lost device ends the process, once the others have finished what was admitted."""
        self._metrics.set_device_up(error.device, False)
        if self._enter(State.FAILED, [State.READY, State.DRAINING]):
            logger.critical("%s", error)

    @property
    def idle(self) -> bool:
        """Nothing was admitted or submitted that has not ended."""
        return not self.num_admitted and not self._batches

    def drain(self) -> None:
        """Takes no new requests from now on."""
        self._enter(State.DRAINING, [State.LOADING, State.READY])

    def close(self) -> bool:
        """Ends the replicas' threads if they have nothing to do; else they can only end with the process.

        Loading cannot be interrupted, and a batch that outlived the grace at shutdown may never end.
        """
        if self._group is None:
            return True
        if not self.idle:
            return False
        loaded = [replica for replica in self._group.replicas if replica.ready.done()]
        for replica in loaded:
            replica.close()
        return len(loaded) == len(self._group.replicas)

    def _enter(self, state: State, come_from: Sequence[State]) -> bool:
        """Changes the state if it is one of those; says whether it did."""
        with self._lock:
            if self.state not in come_from:
                return False
            self.state = state
            self._metrics.ready.set(state is State.READY)
            return True

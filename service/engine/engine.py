"""What joins the app to the models: loading, being ready, failing, closing.

Knows the life cycle of the replicas and the metrics of their devices; nothing of HTTP or images. The replicas
take their batches from the queue.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any

from models import DeviceError, ModelError
from service.answers.dtypes import dtype_name
from service.engine.interfaces import HasReplicas, LoadedEncoder, ServingReplica
from service.errors import Unavailable
from service.metrics import Metrics
from service.queue.batcher import Batcher
from service.queue.queue_records import QueueLimits
from service.queue.tally import Tally

logger = logging.getLogger(__name__)


class State(Enum):
    LOADING = "loading"
    READY = "ready"
    LEAVING = "leaving"  # no longer ready, and still taking requests
    DRAINING = "draining"
    FAILED = "failed"


class Engine:
    """The replicas as the app sees them, from before their model is loaded to their end."""

    def __init__(
        self,
        start_replicas: Callable[[], HasReplicas],
        limits: QueueLimits,
        metrics: Metrics,
        *,
        model_name: str,
        version: str,
        reserved: Tally | None = None,
        owns_devices: bool = True,
    ) -> None:
        """`owns_devices`: this process watches the devices and logs their loss; no other process does."""
        self.batcher = Batcher(
            limits, observe=metrics.observe_batch, on_lost=self._lose_device, reserved=reserved
        )
        self._start_replicas = start_replicas
        self._metrics = metrics
        self._model_name = model_name
        self._version = version
        self._owns_devices = owns_devices
        self._group: HasReplicas | None = None
        self._encoder: LoadedEncoder | None = None
        self._lock = threading.Lock()  # of `state` and `_loading`, which the replicas' threads change too
        self._loading: set[str] = set()
        self.state = State.LOADING
        self.num_accepted = 0

    @property
    def encoder(self) -> LoadedEncoder:
        """A loaded encoder, for what it says of itself. Its device belongs to its replica's thread."""
        assert self._encoder is not None, "the model is not loaded yet"
        return self._encoder

    @property
    def devices(self) -> tuple[str, ...]:
        """The replicas' names, which metrics have as `device`."""
        return tuple(replica.name for replica in self._group.replicas) if self._group else ()

    def start(self) -> None:
        """Starts the replicas' threads, which load the model. An error is a failure to load it."""
        try:
            self._group = self._start_replicas()
            self._serve(self._group)
        except Exception as error:
            self._on_load_failed(error)

    def _serve(self, group: HasReplicas) -> None:
        self._loading = set(self.devices)
        queues = {}
        for device in self.devices:
            self._metrics.add_device(device)
            queues[device] = self.batcher.add_device(device)
        for replica in group.replicas:
            replica.ready.add_done_callback(partial(self._on_loaded, replica))
            # Behind the loading, in the same thread. Nothing is queued before all are loaded.
            serving = replica.serve(queues[replica.name])
            serving.add_done_callback(partial(self._on_served, replica))

    def _on_loaded(self, replica: ServingReplica, ready: Future[Any]) -> None:
        """Runs in the replica's thread, where nobody would hear of an error."""
        try:
            try:
                self._show(replica, ready.result())
            finally:
                is_last = self._end_loading(replica)
            if is_last:
                self._on_all_loaded(ready.result())
        except BaseException as error:
            self._on_load_failed(error)

    def _end_loading(self, replica: ServingReplica) -> bool:
        """Says whether it was the last."""
        with self._lock:
            self._loading.remove(replica.name)
            return not self._loading

    def _show(self, replica: ServingReplica, encoder: LoadedEncoder) -> None:
        self._metrics.set_graphs(
            replica.name,
            sorted(encoder.graphs.graphs),
            memory_bytes=encoder.graphs.memory_bytes,
            capture_seconds=encoder.graphs.capture_seconds,
        )
        self._metrics.set_device_up(replica.name, True)

    def _on_all_loaded(self, encoder: LoadedEncoder) -> None:
        keep_what_is_loaded()
        self._metrics.set_info(
            model=self._model_name,
            fingerprint=encoder.fingerprint,
            dtype=dtype_name(encoder.dtype),
            attn_backend=encoder.attn_backend,
            version=self._version,
        )
        self._encoder = encoder
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
        if self.state is State.LOADING or self._encoder is None:
            raise Unavailable("the model is still being loaded", code="not_ready")

    def check_ready(self) -> None:
        """Raises `Unavailable` unless new requests are wanted."""
        self._check_taking()
        if self.state is State.LEAVING:
            raise _shutting_down()

    def check_room(self) -> None:
        """Raises `Unavailable` or `TooManyRequests` where any new request would be refused."""
        self._check_taking()
        self.batcher.check_room()

    def _check_taking(self) -> None:
        """Raises `Unavailable` unless new requests are taken."""
        self.check_loaded()
        if self.state is State.DRAINING:
            raise _shutting_down()

    @contextmanager
    def accept(self) -> Iterator[None]:
        """One request, which will be finished even if the server is told to stop meanwhile.

        Raises `Unavailable` where it is not taken.
        """
        self._check_taking()
        self.num_accepted += 1
        try:
            yield
        finally:
            self.num_accepted -= 1

    def _on_served(self, replica: ServingReplica, serving: Future[None]) -> None:
        error = ended_early(replica, serving)
        if error is not None:
            self.batcher.lose(replica.name, error)

    def _lose_device(self, error: DeviceError) -> None:
        """One lost device ends the process, once the others have finished what was admitted."""
        self._metrics.set_device_up(error.device, False)
        self._fail()
        if self._owns_devices:
            logger.critical("%s", error)

    async def watch(self, timeout_s: float) -> None:
        """Gives own devices up that have work and finish nothing for so long. Runs until it is cancelled."""
        while self._owns_devices:
            await asyncio.sleep(min(1.0, timeout_s / 4))
            for device in self.batcher.stuck_devices(timeout_s):
                self.batcher.lose(device, stuck(device, timeout_s))

    def on_watch_ended(self, watching: asyncio.Task[None]) -> None:
        """For the task of `watch`. Without it a stuck device would keep its callers waiting unnoticed."""
        error = None if watching.cancelled() else watching.exception()
        if error is not None and self._fail():
            logger.critical("cannot watch the devices: %s", error, exc_info=error)

    @property
    def is_idle(self) -> bool:
        """Nothing was admitted that has not ended, and no device is at work."""
        return not self.num_accepted and self.batcher.is_idle

    def leave(self) -> None:
        """Is no longer ready from now on, but still takes requests; one that still loads takes none."""
        self._enter(State.LEAVING, [State.READY])
        self._enter(State.DRAINING, [State.LOADING])

    def drain(self) -> None:
        """Takes no new requests from now on."""
        self._enter(State.DRAINING, [State.LOADING, State.READY, State.LEAVING])

    def close(self) -> bool:
        """Ends the replicas' threads if they have nothing to do; else they can only end with the process.

        Loading cannot be interrupted, and a batch that outlived the grace at shutdown may never end.
        """
        if self._group is None:
            return True
        if not self.is_idle:
            return False
        self.batcher.close()
        ending = [
            replica
            for replica in self._group.replicas
            if replica.name not in self._loading and not self.batcher.is_lost(replica.name)
        ]
        for replica in ending:
            replica.close()
        return len(ending) == len(self._group.replicas)

    def _fail(self) -> bool:
        """From any other state; says whether it did."""
        return self._enter(State.FAILED, [state for state in State if state is not State.FAILED])

    def _enter(self, state: State, come_from: Sequence[State]) -> bool:
        """Changes the state if it is one of those; says whether it did."""
        with self._lock:
            if self.state not in come_from:
                return False
            self.state = state
            self._metrics.ready.set(state is State.READY)
            return True


def _shutting_down() -> Unavailable:
    return Unavailable("the server is shutting down", code="draining")


def keep_what_is_loaded() -> None:
    """What is loaded stays. Collecting garbage among it would stop the process for half a second."""
    gc.collect()
    gc.freeze()


def ended_early(replica: ServingReplica, serving: Future[None]) -> DeviceError | None:
    """A thread that takes no batches any more, and was not told to end, has lost its device."""
    error = serving.exception()
    if error is None or replica.ready.exception() is not None:
        return None
    return DeviceError(replica.name, error)


def stuck(device: str, timeout_s: float) -> DeviceError:
    """The loss of a device that does not get on."""
    return DeviceError(device, TimeoutError(f"it has work and finished nothing for {timeout_s:g} s"))

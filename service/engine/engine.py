"""The engine joins the app to the models: it loads the replicas, and knows whether requests are accepted.

    LOADING ──► READY ──► LEAVING ──► DRAINING        any state ──► FAILED
       └────────────────────────────────▲

Knows the life cycle of the replicas and the metrics of their devices; nothing of HTTP or images. The replicas
take their batches from the queue.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any

from models import DeviceError, ModelError
from service.answers.dtypes import dtype_name
from service.engine.device_errors import early_end_error, stuck_error
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
    LEAVING = "leaving"  # no longer ready, but requests are still accepted
    DRAINING = "draining"  # accepted requests are finished, new ones are refused
    FAILED = "failed"  # only a restart of the process helps


# The state machine. For each event, the states in which it has an effect, and the state that follows each.
Transitions = Mapping[State, State]

_LOADED: Transitions = {State.LOADING: State.READY}
_LOAD_FAILED: Transitions = {State.LOADING: State.FAILED, State.DRAINING: State.FAILED}
_LEAVE: Transitions = {State.READY: State.LEAVING, State.LOADING: State.DRAINING}
_DRAIN: Transitions = dict.fromkeys((State.LOADING, State.READY, State.LEAVING), State.DRAINING)
_FAILED: Transitions = dict.fromkeys(
    (State.LOADING, State.READY, State.LEAVING, State.DRAINING), State.FAILED
)


class Engine:
    """The replicas as the app sees them, from before their model is loaded to their end.

    Threads of the replicas call it as well as the event loop.
    """

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
        self._lock = threading.Lock()  # guards `state` and `_loading`
        self._loading: set[str] = set()
        self.state = State.LOADING
        self.num_accepted = 0

    @property
    def encoder(self) -> LoadedEncoder:
        """The facts of the loaded encoder. Its device may be used only in its replica's thread."""
        assert self._encoder is not None, "the model is not loaded yet"
        return self._encoder

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the replicas, which are the values of the metrics' label `device`."""
        return tuple(replica.name for replica in self._group.replicas) if self._group else ()

    def start(self) -> None:
        """Starts the threads of the replicas, which load the model. An error is a failure to load."""
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
            # Serving follows loading in the same thread. Nothing is queued before all replicas are loaded.
            serving = replica.serve(queues[replica.name])
            serving.add_done_callback(partial(self._on_served, replica))

    def _on_loaded(self, replica: ServingReplica, ready: Future[Any]) -> None:
        """Runs in the thread of the replica, where an exception would go unnoticed: all are caught."""
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
        """True if it was the last replica that was loading."""
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
        freeze_loaded_objects()
        self._metrics.set_info(
            model=self._model_name,
            fingerprint=encoder.fingerprint,
            dtype=dtype_name(encoder.dtype),
            attn_backend=encoder.attn_backend,
            version=self._version,
        )
        self._encoder = encoder
        if self._change_state(_LOADED):
            logger.info("ready: model %s on %s", self._model_name, ", ".join(self.devices))

    def _on_load_failed(self, error: BaseException) -> None:
        if not self._change_state(_LOAD_FAILED):
            return  # another replica has reported it
        trace = None if isinstance(error, ModelError) else error
        logger.error("cannot load model %s: %s", self._model_name, error, exc_info=trace)

    def check_alive(self) -> None:
        """Raises `Unavailable` if only a restart of the process helps."""
        if self.state is State.FAILED:
            raise Unavailable("the device failed; the server must be restarted", code="device_failed")

    def check_loaded(self) -> None:
        """Raises `Unavailable` until `encoder` is there."""
        self.check_alive()
        if self.state is State.LOADING or self._encoder is None:
            raise Unavailable("the model is still being loaded", code="not_ready")

    def check_ready(self) -> None:
        """Raises `Unavailable` unless the server is ready for new requests."""
        self._check_accepting()
        if self.state is State.LEAVING:
            raise _shutting_down()

    def check_room(self) -> None:
        """Raises `Unavailable` or `TooManyRequests` if every new request would be refused."""
        self._check_accepting()
        self.batcher.check_room()

    def _check_accepting(self) -> None:
        """Raises `Unavailable` unless new requests are accepted."""
        self.check_loaded()
        if self.state is State.DRAINING:
            raise _shutting_down()

    @contextmanager
    def accept(self) -> Iterator[None]:
        """Accepts one request, which will be finished even if the server is told to stop meanwhile.

        Raises `Unavailable` if the request is refused.
        """
        self._check_accepting()
        self.num_accepted += 1
        try:
            yield
        finally:
            self.num_accepted -= 1

    def _on_served(self, replica: ServingReplica, serving: Future[None]) -> None:
        error = early_end_error(replica, serving)
        if error is not None:
            self.batcher.lose(replica.name, error)

    def _lose_device(self, error: DeviceError) -> None:
        """A lost device ends the process, after the other devices have finished the accepted requests."""
        self._metrics.set_device_up(error.device, False)
        self._change_state(_FAILED)
        if self._owns_devices:
            logger.critical("%s", error)

    async def watch(self, timeout_s: float) -> None:
        """Gives up devices that have work and finish none of it for `timeout_s`. Runs until cancelled."""
        while self._owns_devices:
            await asyncio.sleep(min(1.0, timeout_s / 4))
            for device in self.batcher.stuck_devices(timeout_s):
                self.batcher.lose(device, stuck_error(device, timeout_s))

    def on_watch_ended(self, watching: asyncio.Task[None]) -> None:
        """Called when the task of `watch` ends. Without the watch a stuck device would go unnoticed."""
        error = None if watching.cancelled() else watching.exception()
        if error is not None and self._change_state(_FAILED):
            logger.critical("cannot watch the devices: %s", error, exc_info=error)

    @property
    def is_idle(self) -> bool:
        """All accepted requests have ended, and no device has work."""
        return not self.num_accepted and self.batcher.is_idle

    def leave(self) -> None:
        """The server is no longer ready but accepts requests. A server that is still loading refuses them."""
        self._change_state(_LEAVE)

    def drain(self) -> None:
        """From now on, new requests are refused."""
        self._change_state(_DRAIN)

    def close(self) -> bool:
        """Ends the threads of the replicas if they have no work. False if some end only with the process.

        Loading cannot be interrupted, and a batch that is still running after the grace period may never end.
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

    def _change_state(self, transitions: Transitions) -> bool:
        """Enters the state that follows the present one. False if the event has no effect in it."""
        with self._lock:
            following = transitions.get(self.state)
            if following is None:
                return False
            self.state = following
            self._metrics.ready.set(following is State.READY)
            return True


def _shutting_down() -> Unavailable:
    return Unavailable("the server is shutting down", code="draining")


def freeze_loaded_objects() -> None:
    """Excludes the loaded model from garbage collection, which would stop the process for half a second."""
    gc.collect()
    gc.freeze()

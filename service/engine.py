"""What joins the app to the models: loading, being ready, handing batches on, failing, closing.

Knows the life cycle of one replica and the metrics of its device; nothing of HTTP or images.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future
from contextlib import contextmanager
from enum import Enum

import torch

from models import BatchResult, EncodeItem, ModelError, Replica, VisionEncoder
from service.errors import ApiError, Unavailable
from service.metrics import Metrics

logger = logging.getLogger(__name__)

# After one of these the device, or the thread that owns it, is lost to this process.
FATAL = (BrokenExecutor, torch.AcceleratorError)


class State(Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Engine:
    """One replica as the app sees it, from before its model is loaded to its end."""

    def __init__(
        self, start_replica: Callable[[], Replica], metrics: Metrics, *, model_name: str, version: str
    ) -> None:
        self._start_replica = start_replica
        self._metrics = metrics
        self._model_name = model_name
        self._version = version
        self._replica: Replica | None = None
        self._encoder: VisionEncoder | None = None
        self._device = ""  # as metrics name it, once it is known
        self.state = State.LOADING
        self.num_admitted = 0
        self._batches: set[Future[BatchResult]] = set()  # submitted and not ended

    @property
    def encoder(self) -> VisionEncoder:
        """The loaded encoder, for what it says of itself. Its device belongs to the replica's thread."""
        assert self._encoder is not None, "the model is not loaded yet"
        return self._encoder

    def start(self) -> None:
        """Starts the replica's thread, which loads the model."""
        self._replica = self._start_replica()
        self._replica.ready.add_done_callback(self._on_loaded)

    def _on_loaded(self, ready: Future[VisionEncoder]) -> None:
        """Runs in the replica's thread."""
        error = ready.exception()
        if error is not None:
            self._on_load_failed(error)
            return
        self._encoder = encoder = ready.result()
        self._device = str(encoder.device)
        self._metrics.add_device(self._device)
        self._metrics.set_device_up(self._device, True)
        self._metrics.set_info(
            model=self._model_name,
            fingerprint=encoder.fingerprint,
            dtype=dtype_name(encoder.dtype),
            attn_backend=encoder.attn_backend,
            version=self._version,
        )
        if self.state is State.LOADING:
            self._enter(State.READY)
            logger.info("ready: model %s on %s", self._model_name, self._device)

    def _on_load_failed(self, error: BaseException) -> None:
        if isinstance(error, ModelError):
            logger.error("cannot load model %s: %s", self._model_name, error)
        else:
            logger.error("cannot load model %s", self._model_name, exc_info=error)
        self._enter(State.FAILED)

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
            if isinstance(error, FATAL):
                self._lose_device(error)
            self.check_alive()
            raise
        finally:
            self.num_admitted -= 1

    def submit(self, items: Sequence[EncodeItem]) -> Future[BatchResult]:
        """Hands a batch to the device."""
        assert self._replica is not None, "nothing is submitted before the model is loaded"
        batch = self._replica.submit(items)
        self._batches.add(batch)
        batch.add_done_callback(self._on_batch)
        return batch

    def _on_batch(self, batch: Future[BatchResult]) -> None:
        """Runs in the replica's thread."""
        self._batches.discard(batch)
        if batch.cancelled():
            return
        error = batch.exception()
        if error is None:
            self._metrics.observe_batch(self._device, batch.result().stats)
        elif isinstance(error, FATAL):
            self._lose_device(error)

    def _lose_device(self, error: BaseException) -> None:
        if self.state is State.FAILED:
            return
        self._enter(State.FAILED)
        self._metrics.set_device_up(self._device, False)
        logger.critical("device %s is lost: %s", self._device, error)

    @property
    def idle(self) -> bool:
        """Nothing was admitted or submitted that has not ended."""
        return not self.num_admitted and not self._batches

    def drain(self) -> None:
        """Takes no new requests from now on."""
        if self.state is not State.FAILED:
            self._enter(State.DRAINING)

    def close(self) -> bool:
        """Ends the replica's thread if it has nothing to do; else it can only end with the process.

        Loading cannot be interrupted, and a batch that outlived the grace at shutdown may never end.
        """
        if self._replica is None:
            return True
        if not self._replica.ready.done() or not self.idle:
            return False
        self._replica.close()
        return True

    def _enter(self, state: State) -> None:
        self.state = state
        self._metrics.ready.set(state is State.READY)


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")

"""When a device counts as lost although no batch failed: its thread ended, or it makes no progress."""

from __future__ import annotations

from concurrent.futures import Future

from models import DeviceError
from service.engine.interfaces import ServingReplica


def early_end_error(replica: ServingReplica, serving: Future[None]) -> DeviceError | None:
    """The loss of a device whose serving thread ended with an error. None if it was told to end.

    Also None if the model could not be loaded: that is the error to report.
    """
    error = serving.exception()
    if error is None or replica.ready.exception() is not None:
        return None
    return DeviceError(replica.name, error)


def stuck_error(device: str, timeout_s: float) -> DeviceError:
    """The loss of a device that has work and finished none of it for `timeout_s`."""
    return DeviceError(device, TimeoutError(f"it has work and finished nothing for {timeout_s:g} s"))

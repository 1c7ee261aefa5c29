"""The streams that a device's work runs on, and nothing on devices without streams."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType

import torch


class DeviceStream:
    """A CUDA stream for computing, as a context; elsewhere a context that does nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.download = torch.cuda.Stream(device) if device.type == "cuda" else None  # of results
        self._context = torch.cuda.stream(self.cuda)

    def __enter__(self) -> None:
        if self.cuda is not None:
            self._context.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.cuda is not None:
            self._context.__exit__(kind, error, trace)

    def check_device(self) -> None:
        """Raises `torch.AcceleratorError` if a fault left the device unusable. Does not wait for its work."""
        if self.cuda is not None:
            event = torch.cuda.Event()
            event.record(self.cuda)
            event.query()

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        """Lets the caller's stream wait for this one, and keeps the tensors' memory while it reads them."""
        if self.cuda is None:
            return
        caller = torch.cuda.current_stream(self.device)
        caller.wait_stream(self.cuda)
        for tensor in tensors:
            tensor.record_stream(caller)


class Mark:
    """A point in a stream's work, with the time at which the device reached it."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._at = time.perf_counter()
        self._event = None
        if stream is not None:
            self._event = torch.cuda.Event(enable_timing=True, blocking=True)
            self._event.record(stream)

    def wait(self) -> None:
        """Returns once the device has reached the mark. Raises what went wrong on the device."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """By the device's clock. Both marks must have been reached."""
        if self._event is None or earlier._event is None:
            return self._at - earlier._at
        return float(earlier._event.elapsed_time(self._event)) / 1e3

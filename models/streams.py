"""The CUDA streams of a device. On other devices the same classes do nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType

import torch


class DeviceStream:
    """A context that runs the work inside on a CUDA stream. On other devices it does nothing."""

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
        """Makes the caller's stream wait for this one. Keeps the tensors' memory until it has read them."""
        if self.cuda is None:
            return
        caller = torch.cuda.current_stream(self.device)
        caller.wait_stream(self.cuda)
        for tensor in tensors:
            tensor.record_stream(caller)


class Mark:
    """A point in the work of a stream. Measures when the device reaches it."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._at = time.perf_counter()
        self._event = None
        if stream is not None:
            self._event = torch.cuda.Event(enable_timing=True, blocking=True)
            self._event.record(stream)

    def wait(self) -> None:
        """Returns once the device has reached the mark. Raises errors of the device."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """Returns the time since an earlier mark, by the device's clock. Both must have been reached."""
        if self._event is None or earlier._event is None:
            return self._at - earlier._at
        return float(earlier._event.elapsed_time(self._event)) / 1e3

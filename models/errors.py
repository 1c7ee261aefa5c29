"""What can go wrong before the first image, as an operator should read it, and the loss of a device."""

from __future__ import annotations


class ModelError(Exception):
    """A checkpoint, a device or an attention backend that cannot be used; the message is one clear line."""


class DeviceError(Exception):
    """A device failed for good; only another process can use it again. `__cause__` is what it said."""

    def __init__(self, device: str, cause: BaseException) -> None:
        super().__init__(f"device {device} is lost: {str(cause) or repr(cause)}")
        self.device = device
        self.__cause__ = cause

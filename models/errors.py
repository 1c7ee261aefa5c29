"""Errors of the start, written for operators, and the loss of a device."""

from __future__ import annotations


class ModelError(Exception):
    """A checkpoint, a device or an attention backend cannot be used. The message is one clear line."""


class DeviceError(Exception):
    """A device failed for good. Only another process can use it again. `__cause__` is the original error."""

    def __init__(self, device: str, cause: BaseException) -> None:
        super().__init__(f"device {device} is lost: {str(cause) or repr(cause)}")
        self.device = device
        self.__cause__ = cause

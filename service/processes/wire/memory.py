"""Memory that several processes see: without a name, and gone with the last of them that holds it."""

from __future__ import annotations

import errno
import math
import os

import torch


class SharedMemory:
    """So many bytes, zero at first; none is taken from the system before it is written.

    Tensors that look into it keep it alive. The file is needed only to give it to others: Python's own maps
    would hold one file each as long as they live.
    """

    def __init__(self, file: int, num_bytes: int) -> None:
        """Of another process: takes the file over. Raises `OSError` where there is no room for it."""
        self.file = file
        try:
            self.bytes = torch.from_file(
                f"/proc/self/fd/{file}", shared=True, size=num_bytes, dtype=torch.uint8
            )
        except RuntimeError as error:
            raise OSError(errno.ENOMEM, f"no memory of {num_bytes} bytes to share: {error}") from None

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """Raises `OSError` where there is no file or no room for it."""
        file = os.memfd_create("vision-sidecar", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, num_bytes)
            return cls(file, num_bytes)
        except BaseException:
            os.close(file)
            raise

    @property
    def buffer(self) -> memoryview:
        """The bytes for Python."""
        return self.bytes.numpy().data

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """A tensor at an offset in bytes, which is a multiple of its items' size."""
        num_bytes = math.prod(shape) * dtype.itemsize
        return self.bytes[offset : offset + num_bytes].view(dtype).view(shape)

    def close_file(self) -> None:
        """Once all that shall see the memory have it."""
        os.close(self.file)

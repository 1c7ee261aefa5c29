"""Memory that several processes share. It has no name, and is freed when the last of them drops it."""

from __future__ import annotations

import errno
import math
import os

import torch


class SharedMemory:
    """`num_bytes` bytes that are zero at first. The system provides a page when it is first written.

    Tensors that are views of it keep it alive. The file is needed only to send it to other processes: each
    `mmap` of Python would hold a file as long as it lives.
    """

    def __init__(self, file: int, num_bytes: int) -> None:
        """Maps the memory of another process. Takes the file over. Raises `OSError` if there is no room."""
        self.file = file
        try:
            self.bytes = torch.from_file(
                f"/proc/self/fd/{file}", shared=True, size=num_bytes, dtype=torch.uint8
            )
        except RuntimeError as error:
            raise OSError(errno.ENOMEM, f"no memory of {num_bytes} bytes to share: {error}") from None

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """Creates new memory. Raises `OSError` if there is no file or no room for it."""
        file = os.memfd_create("vision-sidecar", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, num_bytes)
            return cls(file, num_bytes)
        except BaseException:
            os.close(file)
            raise

    @property
    def buffer(self) -> memoryview:
        """The bytes, for Python."""
        return self.bytes.numpy().data

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """Returns a view of that shape. `offset` is in bytes, and a multiple of the size of an item."""
        num_bytes = math.prod(shape) * dtype.itemsize
        return self.bytes[offset : offset + num_bytes].view(dtype).view(shape)

    def close_file(self) -> None:
        """Closes the file, once all processes that share the memory have it."""
        os.close(self.file)

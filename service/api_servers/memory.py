"""Memory that several processes see: without a name, and gone with the last of them that holds it."""

from __future__ import annotations

import mmap
import os

import torch


class SharedMemory:
    """So many bytes, zero at first; none is taken from the system before it is written.

    Tensors that look into it keep it alive.
    """

    def __init__(self, file: int, num_bytes: int) -> None:
        """Of another process: takes the file over. Raises `OSError`."""
        self.file = file
        self.num_bytes = num_bytes
        self.map = mmap.mmap(file, num_bytes)

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """Raises `OSError`."""
        file = os.memfd_create("vision-sidecar", os.MFD_CLOEXEC)
        os.ftruncate(file, num_bytes)
        return cls(file, num_bytes)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """A tensor at an offset in bytes, which is a multiple of its items' size."""
        count = 1
        for size in shape:
            count *= size
        return torch.frombuffer(self.map, dtype=dtype, count=count, offset=offset).view(shape)

    def close_file(self) -> None:
        """Once all that shall see the memory have it."""
        os.close(self.file)

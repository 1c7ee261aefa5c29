"""The file of one image's tokens: its header, how it is written, and how it is read back.

A safetensors file with the tensor `tokens` [num_tokens, width] and the metadata `grid_thw` and `fingerprint`.
Source: the description of the format in the documentation of safetensors.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import orjson
import torch

from service.answers.arrays import bytes_of, little_endian
from service.answers.dtypes import dtype_name
from service.handoff.entry import CLAIM_SUFFIX, PART_SUFFIX, SUFFIX, Entry

_MODE = 0o640
_HEADER_BYTES = 512  # of every file, with the length in front, so that its size follows from its tokens
_PART_BYTES = 4 << 20  # written in one call
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_NAMES = {code: name for name, code in _DTYPES.items()}

_numbers = itertools.count()


def file_bytes(num_tokens: int, width: int, itemsize: int) -> int:
    """The size of the file with these tokens."""
    return _HEADER_BYTES + num_tokens * width * itemsize


@dataclass(frozen=True)
class TokenFile:
    """A sink for the tokens of one image: the file `<uuid>.safetensors` in a folder.

    Any process may use it. The file is not dropped for `lease_s` seconds after it was written.
    """

    folder: str
    uuid: str
    grid_thw: tuple[int, int, int]
    fingerprint: str
    lease_s: float

    def open(self, shape: tuple[int, int], dtype: torch.dtype) -> TokenFileWriting:
        """Opens a new file beside the final one. Raises `OSError`."""
        return TokenFileWriting(self, shape, dtype)

    def header(self, shape: tuple[int, int], dtype: torch.dtype) -> bytes:
        """The bytes in front of the tokens."""
        metadata = {"grid_thw": orjson.dumps(self.grid_thw).decode(), "fingerprint": self.fingerprint}
        tensor = {
            "dtype": _DTYPES[dtype_name(dtype)],
            "shape": shape,
            "data_offsets": (0, shape[0] * shape[1] * dtype.itemsize),
        }
        text = orjson.dumps({"__metadata__": metadata, "tokens": tensor}).ljust(_HEADER_BYTES - 8)
        assert len(text) == _HEADER_BYTES - 8, "the header has room for every grid and fingerprint"
        return len(text).to_bytes(8, "little") + text


class TokenFileWriting:
    """A file that is being written. It gets its name once all of it is there."""

    def __init__(self, target: TokenFile, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self._path = f"{target.folder}/{target.uuid}{SUFFIX}"
        self._part = f"{target.folder}/{target.uuid}.{os.getpid()}-{next(_numbers)}{PART_SUFFIX}"
        self._claim = f"{target.folder}/{target.uuid}{CLAIM_SUFFIX}"
        self._lease_s = target.lease_s
        self._header = target.header(shape, dtype)
        self._num_bytes = file_bytes(*shape, dtype.itemsize)
        self._file: int | None = os.open(
            self._part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _MODE
        )
        os.fchmod(self._file, _MODE)  # whatever the umask
        self._memory: npt.NDArray[np.uint8] | None = None  # of the file, if it is mapped
        self._lock = threading.Lock()
        self._is_writing = False

    def allocate(self, *, alone: bool) -> None:
        """Allocates the pages of the file, which takes two thirds of the time of writing new ones.

        If it is `alone`, also maps them: threads write to mapped memory in parallel, but to a file in turn.
        """
        with self._lock:
            if self._file is None or self._is_writing:
                return
            os.posix_fallocate(self._file, 0, self._num_bytes)
            if alone:
                self._memory = _map(self._file, self._num_bytes)

    def parts(self, rows: torch.Tensor) -> Sequence[Callable[[], None]]:
        """Calls that write the file, each a part of it. They raise `OSError`, such as for a full disk."""
        with self._lock:  # waits for `allocate`, if that has begun
            self._is_writing = True
        tokens = bytes_of(little_endian(rows))
        slices = [(0, memoryview(self._header))]
        for start in range(0, len(tokens), _PART_BYTES):
            slices.append((_HEADER_BYTES + start, tokens[start : start + _PART_BYTES]))
        return [partial(self._write, offset, piece) for offset, piece in slices]

    def _write(self, offset: int, piece: memoryview) -> None:
        assert self._file is not None, "the file is open until all parts are written"
        if self._memory is not None:
            np.copyto(self._memory[offset : offset + len(piece)], np.frombuffer(piece, np.uint8))
            return
        while len(piece):
            written = os.pwrite(self._file, piece, offset)
            offset, piece = offset + written, piece[written:]

    def commit(self) -> None:
        """Gives the file its name, with a lease, if a request still claims it."""
        assert self._file is not None, "a file is committed once"
        if not os.path.exists(self._claim):
            return
        now = time.time()
        os.utime(self._file, (now, now + self._lease_s))
        os.rename(self._part, self._path)
        self._close()

    def discard(self) -> None:
        """Deletes the file, unless it was committed."""
        if self._file is not None:
            self._close()
            with suppress(FileNotFoundError):
                os.unlink(self._part)

    def _close(self) -> None:
        with self._lock:  # `allocate` may still run
            if self._file is not None:
                os.close(self._file)
                self._file = self._memory = None


def _map(file: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """The memory of a file whose pages are allocated. Its pages are present, which takes most of the time."""
    memory = np.frombuffer(mmap.mmap(file, num_bytes), np.uint8)
    memory[:: mmap.PAGESIZE] = 0  # releases the interpreter lock, which `mmap.mmap` itself would hold
    return memory


def read_entry(file: int, uuid: str) -> Entry:
    """The facts of an open file. Raises `ValueError` if the file is not one of ours, or not whole."""
    num_bytes = os.fstat(file).st_size
    data = os.pread(file, _HEADER_BYTES, 0)
    if int.from_bytes(data[:8], "little") != _HEADER_BYTES - 8:
        raise ValueError("not a file of tokens")
    try:
        header = orjson.loads(data[8:])
        tensor = header["tokens"]
        num_tokens, width = map(int, tensor["shape"])
        dtype = _NAMES[tensor["dtype"]]
        t, h, w = map(int, orjson.loads(header["__metadata__"]["grid_thw"]))
        _, end = tensor["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a file of tokens: {error!r}") from None
    if _HEADER_BYTES + end != num_bytes:
        raise ValueError("a file of tokens that is not whole")
    return Entry(uuid, (t, h, w), num_tokens, width, dtype, num_bytes)

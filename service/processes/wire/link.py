"""A line between two processes: whole messages, in order, with files.

Both ends are ours, so what arrives is trusted and unpickled.
"""

from __future__ import annotations

import errno
import os
import pickle
import socket
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from service.processes.wire.memory import SharedMemory

# A message has to fit the socket's buffer. Larger ones travel in memory of their own.
_MAX_INLINE_BYTES = 2**14
MAX_FILES = 250  # in one message; the kernel takes 253
_ANCILLARY_BYTES = socket.CMSG_LEN((MAX_FILES + 1) * array("i").itemsize)


@dataclass(frozen=True)
class _Large:
    """Stands for a message that is in the first of the files."""

    num_bytes: int


class Link:
    """One end. It may be written by several threads and read by one."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    @classmethod
    def pair(cls) -> tuple[Link, Link]:
        """Two ends in one process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    @classmethod
    def of_file(cls, file: int) -> Link:
        """The end that another process gave to this one."""
        return cls(socket.socket(fileno=file))

    @classmethod
    def pairs_of_files(cls, files: Sequence[int]) -> list[tuple[Link, Link]]:
        """The ends that other processes gave to this one, two by two."""
        ends = [cls.of_file(file) for file in files]
        return [*zip(ends[::2], ends[1::2], strict=True)]

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: object, files: Sequence[int] = ()) -> None:
        """Sends a message with copies of files. Raises `OSError` once the other end is closed."""
        data = pickle.dumps(message)
        if len(data) <= _MAX_INLINE_BYTES:
            socket.send_fds(self.socket, [data], files)
            return
        memory = SharedMemory.create(len(data))
        memory.buffer[:] = data
        try:
            socket.send_fds(self.socket, [pickle.dumps(_Large(len(data)))], [memory.file, *files])
        finally:
            memory.close_file()

    def receive(self) -> tuple[Any, list[int]]:
        """The next message and its files, which are the caller's to close.

        Files are missing where this process may have no more. Raises `EOFError` once one of the ends is
        closed, `OSError` where a large message is lost for lack of a file, and what the socket raises where
        it does not wait.
        """
        try:
            data, ancillary = self._receive()
        except OSError as error:
            is_closed = self.socket.fileno() < 0  # by another thread of ours
            if not is_closed and not isinstance(error, ConnectionError):
                raise
            data, ancillary = b"", []
        if not data:
            raise EOFError("the line to the other process has ended")
        files = array("i", b"".join(sent for _, _, sent in ancillary)).tolist()
        message = pickle.loads(data)
        if isinstance(message, _Large):
            try:
                message = _read_large(message, files)
            except BaseException:
                for file in files:
                    os.close(file)
                raise
        return message, files

    def _receive(self) -> tuple[bytes, list[tuple[int, int, bytes]]]:
        # Not `recv_fds`, which passes no flags on in Python 3.11.
        arguments = _MAX_INLINE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
        try:
            return self.socket.recvmsg(*arguments)[:2]
        except ConnectionResetError:  # said once, before what the other end had sent; none after it
            return self.socket.recvmsg(*arguments)[:2]

    def close(self) -> None:
        """Ends the line, also for a thread that waits for a message."""
        with suppress(OSError):  # the other end was first
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _read_large(message: _Large, files: list[int]) -> Any:
    if not files:
        raise OSError(errno.EMFILE, "no file for a message from another process")
    memory = SharedMemory(files[0], message.num_bytes)
    os.close(files.pop(0))
    return pickle.loads(memory.buffer)

"""A link between two processes: whole messages, in order, with files.

Both ends are ours, so messages are trusted and unpickled.
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

# A message has to fit into the buffer of the socket. A larger one travels in shared memory.
_MAX_INLINE_BYTES = 2**14
MAX_FILES = 250  # in one message; the kernel takes 253
_ANCILLARY_BYTES = socket.CMSG_LEN((MAX_FILES + 1) * array("i").itemsize)


@dataclass(frozen=True)
class _Large:
    """Takes the place of a message that is in the first of the files."""

    num_bytes: int


class Link:
    """One end of a link. Several threads may send, and one may receive."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    @classmethod
    def pair(cls) -> tuple[Link, Link]:
        """Returns both ends of a new link."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    @classmethod
    def of_file(cls, file: int) -> Link:
        """Returns the end that another process sent as a file."""
        return cls(socket.socket(fileno=file))

    @classmethod
    def pairs_of_files(cls, files: Sequence[int]) -> list[tuple[Link, Link]]:
        """Returns the ends that other processes sent as files, two by two."""
        ends = [cls.of_file(file) for file in files]
        return [*zip(ends[::2], ends[1::2], strict=True)]

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: object, files: Sequence[int] = ()) -> None:
        """Sends a message with copies of files. Raises `OSError`, also if the other end is closed."""
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
        """Returns the next message and its files, which the caller closes.

        Files are missing if this process may open no more. Raises `EOFError` once one of the ends is closed,
        `OSError` if a large message is lost because no file is left, and `BlockingIOError` if the socket does
        not block and no message waits.
        """
        try:
            data, ancillary = self._receive()
        except OSError as error:
            is_closed = self.socket.fileno() < 0  # by another thread of this process
            if not is_closed and not isinstance(error, ConnectionError):
                raise
            data, ancillary = b"", []
        if not data:
            raise EOFError("the link to the other process has ended")
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
        except ConnectionResetError:  # raised once, before the messages that the other end has sent
            return self.socket.recvmsg(*arguments)[:2]

    def close(self) -> None:
        """Closes the link, also for a thread that waits for a message."""
        with suppress(OSError):  # the other end has closed it
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _read_large(message: _Large, files: list[int]) -> Any:
    if not files:
        raise OSError(errno.EMFILE, "no file for a message from another process")
    memory = SharedMemory(files[0], message.num_bytes)
    os.close(files.pop(0))
    return pickle.loads(memory.buffer)

"""The end of a connection: clients that still send may read the response; idle ones are cut off.

Knows sockets; knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections.abc import Callable
from typing import Any

# After an early response the server reads on, for this long and this many bytes, before it closes.
LINGER_S = 2.0
LINGER_BYTES = 2**26
# How long a half-closed idle connection is still read, for a request that the client has just sent.
IDLE_LINGER_S = 0.25
# A client is reading an answer if it has taken this many bytes since the last check, or all that were left.
MIN_TAKEN_BYTES = 2**16

_NUM_CHECKS = 6  # of the bytes that are left, within the time limit of an `UnreadWatch`


class UnreadWatch:
    """Aborts a connection that has bytes to write if its client reads nothing for `timeout_s`."""

    def __init__(self, transport: asyncio.Transport, timeout_s: float) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._num_left = 0  # bytes, when the client last read some
        self._read_at = 0.0

    def start(self) -> None:
        """Watches until all bytes are written. The time limit begins anew at each call."""
        self.stop()
        if self._transport.get_write_buffer_size():
            self._note_progress(self._count_left())
            self._check_later()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _note_progress(self, num_left: int) -> None:
        self._num_left = num_left
        self._read_at = self._loop.time()

    def _check_later(self) -> None:
        self._timer = self._loop.call_later(self._timeout_s / _NUM_CHECKS, self._check)

    def _check(self) -> None:
        self._timer = None
        if not self._transport.get_write_buffer_size():
            return
        num_left = self._count_left()
        if num_left <= self._num_left - MIN_TAKEN_BYTES:
            self._note_progress(num_left)
        elif self._loop.time() >= self._read_at + self._timeout_s:
            self._transport.abort()
            return
        self._check_later()

    def _count_left(self) -> int:
        """Bytes that the client has not read yet.

        Includes the bytes in the kernel, which has room for megabytes and asks for more once a third is free.
        """
        file = self._transport.get_extra_info("socket").fileno()
        (num_in_kernel,) = struct.unpack("i", fcntl.ioctl(file, termios.TIOCOUTQ, bytes(4)))
        return self._transport.get_write_buffer_size() + int(num_in_kernel)


class LingeringTransport(asyncio.Transport):
    """A connection. `close` waits for a client that is still sending, so that it can read the response."""

    def __init__(
        self,
        transport: asyncio.Transport,
        protocol: asyncio.Protocol,
        unread: UnreadWatch,
        is_sending: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._transport = transport
        self._protocol = protocol
        self._unread = unread
        self._is_sending = is_sending  # whether the client is in the middle of a request
        self._is_lingering = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_lingering:
            self._transport.write(data)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def is_closing(self) -> bool:
        return self._is_lingering or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        self._unread.start()  # closing waits until the last byte is written
        if self._is_sending():
            self._linger(LINGER_S)
        else:
            self._transport.close()

    def close_idle(self) -> None:
        """Closes a connection that waits for a request: one that crosses the end is not reset."""
        if not self.is_closing():
            self._unread.start()
            self._linger(LINGER_S if self._is_sending() else IDLE_LINGER_S)

    def _linger(self, seconds: float) -> None:
        self._is_lingering = True
        _Lingering(self._transport, self._protocol, seconds)


class _Lingering(asyncio.Protocol):
    """Takes over a connection after its last response, and drops the bytes that the client still sends.

    Closing a socket with unread data resets the connection, and the client may lose the answer. So the
    connection is half-closed first, and the socket is closed when the client closes it, or after some time.
    """

    def __init__(self, transport: asyncio.Transport, protocol: asyncio.Protocol, seconds: float) -> None:
        self._transport = transport
        self._protocol = protocol
        self._seconds = seconds
        self._num_bytes = 0
        self._close_later()
        transport.set_protocol(self)
        transport.write_eof()
        transport.resume_reading()

    def _close_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._close)

    def _close(self) -> None:
        if self._transport.get_write_buffer_size():
            self._close_later()
        else:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > LINGER_BYTES:
            self._transport.pause_reading()  # the client waits, or reads its response

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._protocol.connection_lost(exc)

"""Standard error for a process that must not stop when its log is not read.

A write to a full pipe, or to a terminal that is held, blocks until somebody reads. Here only one thread waits
for that. Knows nothing of loggers or formats.
"""

from __future__ import annotations

import io
import os
import queue
import threading
from collections.abc import Callable

MAX_TEXTS = 4096  # texts that wait to be written; a log line is one text
_MAX_CLOSE_S = 1.0


class LogStream(io.TextIOBase):
    """A text stream whose `write` returns at once. A thread writes the texts to a file, in order.

    When `MAX_TEXTS` wait, further texts are dropped until all of them are written. Then the stream writes
    `describe_loss(count)`, where `count` is the number of texts that were dropped or could not be written.
    """

    encoding = "utf-8"

    def __init__(self, file: int, describe_loss: Callable[[int], str]) -> None:
        """`file` is the file descriptor. It stays open."""
        self._file = file
        self._describe_loss = describe_loss
        # SimpleQueue and RLock are reentrant: a signal handler or a destructor may write during a write.
        self._waiting: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        self._lock = threading.RLock()  # guards _num_dropped, and that nothing waits behind a dropped text
        self._num_dropped = 0
        self._num_lost = 0  # used by the thread only
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def write(self, text: str) -> int:
        """Hands the text to the thread, or drops it. Never blocks, never fails."""
        with self._lock:
            if self._num_dropped or self._waiting.qsize() >= MAX_TEXTS:
                self._num_dropped += 1
            else:
                self._waiting.put(text)
        return len(text)

    def wait_until_written(self) -> None:
        """Waits until all texts so far are written, but at most one second."""
        written = threading.Event()
        self._waiting.put(written)
        written.wait(_MAX_CLOSE_S)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file

    def isatty(self) -> bool:
        return os.isatty(self._file)

    def _write_all(self) -> None:
        while True:
            text_or_event = self._waiting.get()
            if isinstance(text_or_event, str):
                self._num_lost += not self._write(text_or_event)
            if self._waiting.empty():
                self._report_loss()
            if isinstance(text_or_event, threading.Event):
                text_or_event.set()

    def _report_loss(self) -> None:
        """Tells how many texts are missing at this place of the log. If that fails, tries again later."""
        with self._lock:
            self._num_lost += self._num_dropped
            self._num_dropped = 0
        if self._num_lost and self._write(self._describe_loss(self._num_lost)):
            self._num_lost = 0

    def _write(self, text: str) -> bool:
        """Writes directly to the file: a buffered stream that blocks aborts the interpreter at its end."""
        rest = text.encode(self.encoding, "backslashreplace")
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:  # the reader has closed the pipe, or the disk is full
            return False
        return True

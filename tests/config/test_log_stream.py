from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from service.config.log_stream import MAX_TEXTS, LogStream
from tests.support.project import ROOT
from tests.support.waiting import eventually


@dataclass
class Pipe:
    """A stream into a pipe that is read only when the test calls `read_lines`."""

    reader: int
    writer: int
    stream: LogStream = field(init=False)

    def __post_init__(self) -> None:
        self.stream = LogStream(self.writer, lambda count: f"lost {count}\n")

    def fill(self) -> None:
        """Fills the pipe, and lets the thread of the stream block on one text. The queue is empty then."""
        os.set_blocking(self.writer, False)
        try:
            while True:
                os.write(self.writer, b"x" * 4095 + b"\n")
        except BlockingIOError:
            os.set_blocking(self.writer, True)
        self.stream.write("first\n")
        eventually(lambda: self.stream._waiting.empty())

    def read_lines(self) -> list[str]:
        """The lines of the stream until all its texts are written, without those that fill the pipe."""
        with os.fdopen(os.dup(self.reader)) as file:
            threading.Thread(target=self._close_writer).start()
            return [line.rstrip("\n") for line in file if not line.startswith("xxx")]

    def _close_writer(self) -> None:
        self.stream.wait_until_written()
        os.close(self.writer)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    reader, writer = os.pipe()
    yield Pipe(reader, writer)
    os.close(reader)


def test_texts_are_written_in_order(pipe: Pipe) -> None:
    for number in range(100):
        assert pipe.stream.write(f"{number}\n") == len(f"{number}\n")
    assert pipe.read_lines() == [str(number) for number in range(100)]


def test_write_to_full_pipe_returns_at_once(pipe: Pipe) -> None:
    pipe.fill()
    started = time.monotonic()
    for number in range(MAX_TEXTS + 1000):
        pipe.stream.write(f"{number}\n")
    assert time.monotonic() - started < 1.0
    pipe.read_lines()


def test_dropped_texts_are_counted_where_they_are_missing(pipe: Pipe) -> None:
    pipe.fill()
    for number in range(MAX_TEXTS + 7):
        pipe.stream.write(f"{number}\n")
    os.read(pipe.reader, 65536)
    eventually(lambda: pipe.stream._num_dropped == 0)
    pipe.stream.write("next\n")
    lines = pipe.read_lines()
    assert lines == ["first", *map(str, range(MAX_TEXTS)), "lost 7", "next"]


def test_waiting_for_full_pipe_ends_after_one_second(pipe: Pipe) -> None:
    pipe.fill()
    started = time.monotonic()
    pipe.stream.wait_until_written()
    assert 0.9 < time.monotonic() - started < 3.0
    pipe.read_lines()


def test_lone_surrogate_is_written_with_an_escape(pipe: Pipe) -> None:
    pipe.stream.write("a\ud800ä\n")
    assert pipe.read_lines() == ["a\\ud800ä"]


def test_closed_pipe_is_not_an_error_and_the_loss_is_reported_later() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = LogStream(writer, lambda count: f"lost {count}\n")
    for _ in range(3):
        stream.write("unread\n")
    stream.wait_until_written()
    reader, new_writer = os.pipe()
    os.dup2(new_writer, writer)
    stream.write("read\n")
    stream.wait_until_written()
    assert os.read(reader, 100) == b"read\nlost 3\n"
    for file in (reader, writer, new_writer):
        os.close(file)


@pytest.mark.parametrize(
    ("ending", "code", "last_line"),
    [
        ("sys.exit(3)", 3, "line 2999 of the log"),
        ("end_process(3)", 3, "line 2999 of the log"),
        ("raise ValueError('uncaught')", 1, "ValueError: uncaught"),
    ],
)
@pytest.mark.parametrize("is_read", [True, False])
def test_end_of_process_writes_the_whole_log_or_gives_up_soon(
    ending: str, code: int, last_line: str, is_read: bool
) -> None:
    script = (
        "import logging, sys, warnings\n"
        "from service.config.logs import configure_logging, end_process\n"
        "configure_logging('info', 'text')\n"
        "warnings.warn('from a library')\n"
        "for n in range(3000): logging.getLogger('service').info('line %d of the log', n)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script + ending], cwd=ROOT, stderr=subprocess.PIPE)
    assert process.stderr is not None
    with process.stderr as log:
        if is_read:
            lines = log.read().decode().splitlines()
            assert "UserWarning: from a library" in lines[0]
            assert len([line for line in lines if line.endswith(" of the log")]) == 3000
            assert lines[-1].endswith(last_line)
        assert process.wait(timeout=20) == code

"""A server in a process of its own, with its log, and slow clients of it."""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection

import httpx

from tests.support import forkserver
from tests.support.app import encode_image
from tests.support.project import ROOT


class Process:
    """A server in its own process group, and the lines of its log so far.

    A thread reads the log all the time, so that no line is dropped. The process is forked from one that has
    imported the service already. With `is_anew` it is a new interpreter, for tests of the start.
    """

    def __init__(self, *flags: str, environ: Mapping[str, str] = {}, is_anew: bool = False) -> None:
        out, their_out = multiprocessing.Pipe(duplex=False)
        err, their_err = multiprocessing.Pipe(duplex=False)
        start = _start_interpreter if is_anew else forkserver.serve
        self._process = start(list(flags), environ, their_out, their_err)
        their_out.close()
        their_err.close()
        self._out, self._err = (os.fdopen(os.dup(end.fileno())) for end in (out, err))
        out.close()
        err.close()
        self.pid = self._process.pid
        self._unread: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: the log has ended
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.log: list[str] = []
        self.url = ""

    def _read(self) -> None:
        for line in self._err:
            self._unread.put(line.rstrip("\n"))
        self._unread.put(None)

    def wait_for_line(self, text: str) -> str:
        while (line := self._unread.get(timeout=60)) is not None:
            self.log.append(line)
            if text in line:
                return line
        raise AssertionError(f"no line with {text!r} in {self.log}")

    def listening(self) -> Process:
        self.url = self.wait_for_line("listening on ").rsplit(" ", 1)[1].strip()
        return self

    def ready(self) -> Process:
        self.listening().wait_for_line("ready: model")
        return self

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def exit_code(self) -> int:
        code = self._process.wait(timeout=30)
        assert self._out.read() == ""
        self._reader.join()
        while not self._unread.empty():
            line = self._unread.get()
            self.log += [] if line is None else [line]
        self._close()
        return code

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._close()

    def _close(self) -> None:
        self._out.close()
        self._err.close()


def _start_interpreter(
    flags: list[str], environ: Mapping[str, str], out: Connection, err: Connection
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "service", "serve", *flags],
        cwd=ROOT,
        env={**os.environ, **environ},
        stdout=out.fileno(),
        stderr=err.fileno(),
        process_group=0,
    )


class SlowUpload:
    """A request that stays in flight until the test sends the rest of its body."""

    def __init__(self, url: str) -> None:
        self._body = encode_image(64, 64)
        host, port = url.removeprefix("http://").rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), timeout=20)
        head = ["POST /embed HTTP/1.1", "host: x", "content-type: image/png"]
        head += [f"content-length: {len(self._body)}", "", ""]
        self._socket.sendall("\r\n".join(head).encode() + self._body[:50])

    def finish(self) -> None:
        self._socket.sendall(self._body[50:])

    def leave(self) -> None:
        self._socket.close()

    def status(self) -> int:
        """The status of the answer. 0 if the connection was closed without an answer."""
        head = self.head()
        return int(head[9:12]) if head else 0

    def head(self) -> str:
        with self._socket, self._socket.makefile("rb") as file:
            return file.read().partition(b"\r\n\r\n")[0].decode().lower()


class SlowReader:
    """A request for many tokens. Its answer is not read yet, and fills every buffer on the way."""

    def __init__(self, url: str) -> None:
        images = [encode_image(512, 512, format="JPEG", seed=n) for n in range(16)]
        request = httpx.Request(
            "POST",
            f"{url}/embed?pooling=none&deepstack=true&encoding_format=base64",
            files=[("image", (f"{i}.jpg", image)) for i, image in enumerate(images)],
        )
        lines = [f"{name}: {value}" for name, value in request.headers.items()]
        host, port = url.removeprefix("http://").rsplit(":", 1)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        self._socket.settimeout(60)
        self._socket.connect((host, int(port)))
        head = "\r\n".join([f"POST {request.url.raw_path.decode()} HTTP/1.1", *lines, "", ""])
        self._socket.sendall(head.encode() + request.read())

    def wait_for_the_first_bytes(self) -> None:
        assert self._socket.recv(12) == b"HTTP/1.1 200"

    def leave(self) -> None:
        self._socket.close()

    def rest(self) -> bytes:
        with self._socket, self._socket.makefile("rb") as file:
            return file.read()


def wait_for_metric(url: str, line: str) -> None:
    deadline = time.monotonic() + 10
    while f"vision_sidecar_{line}\n" not in httpx.get(f"{url}/metrics").text:
        assert time.monotonic() < deadline, f"never came: {line}"
        time.sleep(0.02)


def wait_until_unready(url: str) -> httpx.Response:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        response = httpx.get(f"{url}/readyz")
        if response.status_code == 503:
            return response
        time.sleep(0.02)
    raise AssertionError("still ready")

"""The end of connections, in cases that no client of a real server can cause."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from service.http.transport import LINGER_S, LingeringTransport, UnreadWatch
from tests.support.clock import SkippingLoop, skip

TIMEOUT_S = 6.0
CHECK_S = 1.0  # between two checks of a watch


class FakeTransport(asyncio.Transport):
    """A connection that records its calls. `num_waiting` bytes are not in the kernel yet."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__()
        self._end = end
        self.num_waiting = 0
        self.num_looks = 0
        self.calls: list[str] = []

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._end if name == "socket" else default

    def get_write_buffer_size(self) -> int:
        self.num_looks += 1
        return self.num_waiting

    def is_closing(self) -> bool:
        return "close" in self.calls

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.calls.append("write")

    def write_eof(self) -> None:
        self.calls.append("write_eof")

    def pause_reading(self) -> None:
        self.calls.append("pause_reading")

    def resume_reading(self) -> None:
        self.calls.append("resume_reading")

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")


@pytest.fixture
def fake() -> Iterator[FakeTransport]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield FakeTransport(ours)


def run(talk: Callable[[], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(talk())


def lingering(fake: FakeTransport) -> LingeringTransport:
    """A closed connection whose client is still sending."""
    transport = LingeringTransport(fake, asyncio.Protocol(), UnreadWatch(fake, TIMEOUT_S), lambda: True)
    transport.close()
    return transport


def test_restarted_watch_keeps_a_single_timer(fake: FakeTransport) -> None:
    async def talk() -> None:
        watch = UnreadWatch(fake, TIMEOUT_S)
        fake.num_waiting = 10
        looks = []
        for starts in (1, 5):
            for _ in range(starts):
                watch.start()
            before = fake.num_looks
            await skip(CHECK_S)
            looks.append(fake.num_looks - before)
        assert looks[0] == looks[1] > 0
        watch.stop()
        before = fake.num_looks
        await skip(TIMEOUT_S)
        assert (fake.num_looks, fake.calls) == (before, [])

    run(talk)


def test_restarting_a_watch_restarts_its_time_limit(fake: FakeTransport) -> None:
    async def talk() -> None:
        watch = UnreadWatch(fake, TIMEOUT_S)
        fake.num_waiting = 10
        for _ in range(2):
            watch.start()
            for _ in range(5):
                await skip(CHECK_S)
            assert fake.calls == []
        await skip(CHECK_S)
        assert fake.calls == ["abort"]

    run(talk)


def test_nothing_is_written_after_close(fake: FakeTransport) -> None:
    async def talk() -> None:
        transport = lingering(fake)
        assert transport.is_closing()
        transport.write(b"more")
        transport.close()
        assert fake.calls == ["write_eof", "resume_reading"]
        await skip(LINGER_S)
        assert fake.calls == ["write_eof", "resume_reading", "close"]

    run(talk)


def test_connection_lost_while_lingering_is_not_closed_later(fake: FakeTransport) -> None:
    async def talk() -> None:
        lingering(fake)
        assert isinstance(fake.protocol, asyncio.Protocol)
        fake.protocol.connection_lost(None)
        await skip(LINGER_S)
        assert "close" not in fake.calls

    run(talk)

"""A caller that leaves is noticed. The tests feed the receive channel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
from starlette.types import Message

from service.http.caller import watch_caller

DISCONNECT: Message = {"type": "http.disconnect"}
REST: Message = {"type": "http.request", "body": b"", "more_body": False}


class Channel:
    """A receive channel that counts its calls."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[Message | Exception] = asyncio.Queue()
        self.num_asked = 0
        self.num_waiting = 0

    def put(self, message: Message | Exception) -> None:
        self._messages.put_nowait(message)

    async def receive(self) -> Message:
        self.num_asked += 1
        self.num_waiting += 1
        try:
            message = await self._messages.get()
        finally:
            self.num_waiting -= 1
        if isinstance(message, Exception):
            raise message
        return message


async def turns() -> None:
    """Lets all tasks run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


def run(check: Callable[[Channel, list[bool]], Coroutine[Any, Any, None]]) -> None:
    """Runs the check. Fails if a callback raised, which asyncio only reports to its handler."""
    told: list[dict[str, Any]] = []

    async def checked() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        await check(Channel(), [])
        await turns()

    asyncio.run(checked())
    assert not told


@pytest.mark.parametrize(
    ("message", "has_left"),
    [(DISCONNECT, True), (REST, False), (OSError("reset"), True), (RuntimeError("receive is over"), True)],
)
def test_disconnect_or_failed_receive_means_the_caller_left(
    message: Message | Exception, has_left: bool
) -> None:
    async def check(channel: Channel, left: list[bool]) -> None:
        with watch_caller(channel.receive, lambda: left.append(True)):
            await turns()
            assert not left
            channel.put(message)
            await turns()
            assert left == [True] * has_left

    run(check)


def test_caller_that_left_earlier_is_noticed() -> None:
    async def check(channel: Channel, left: list[bool]) -> None:
        channel.put(DISCONNECT)
        with watch_caller(channel.receive, lambda: left.append(True)):
            await turns()
        assert left == [True]

    run(check)


def test_a_single_task_waits_for_the_whole_block() -> None:
    async def check(channel: Channel, left: list[bool]) -> None:
        with watch_caller(channel.receive, lambda: left.append(True)):
            for _ in range(5):
                await turns()
            assert (channel.num_asked, channel.num_waiting) == (1, 1)

    run(check)


@pytest.mark.parametrize("error", [None, ValueError("odd"), asyncio.CancelledError()])
def test_watching_ends_with_the_block(error: BaseException | None) -> None:
    async def check(channel: Channel, left: list[bool]) -> None:
        with (
            suppress(ValueError, asyncio.CancelledError),
            watch_caller(channel.receive, lambda: left.append(True)),
        ):
            await turns()
            if error is not None:
                raise error
        await turns()
        assert channel.num_waiting == 0
        channel.put(DISCONNECT)
        await turns()
        assert not left

    run(check)

"""Whether the caller is still there. Knows ASGI's receive channel, and nothing of the work done for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Message, Receive


@contextmanager
def watch_caller(receive: Receive, on_left: Callable[[], None]) -> Iterator[None]:
    """Calls `on_left` once the caller closes the connection, until the block ends. The body has been read.

    A caller of whom nothing can be received any more has left.

    One waiting task, because `Request.is_disconnected` opens and cancels a scope at every call, which costs
    more than all else that is done for a small image on the event loop.
    """

    def received(message: asyncio.Future[Message]) -> None:
        if message.cancelled():
            return
        if message.exception() is not None or message.result()["type"] == "http.disconnect":
            on_left()

    message = asyncio.ensure_future(_receive(receive))
    message.add_done_callback(received)
    try:
        yield
    finally:
        message.cancel()


async def _receive(receive: Receive) -> Message:
    return await receive()

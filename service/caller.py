"""Whether the caller is still there. Knows ASGI's receive channel, and nothing of the work done for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive


class Caller:
    """Watches the connection of one request from when its body has been read.

    One waiting task, because `Request.is_disconnected` opens and cancels a scope at every call, which costs
    more than all else that is done for a small image on the event loop.
    """

    def __init__(self, receive: Receive) -> None:
        self._next: asyncio.Future[Message] = asyncio.ensure_future(_receive(receive))

    def stop_if_left(self) -> None:
        """Raises `ClientDisconnect` once the caller has closed the connection."""
        if self._next.done() and self._next.result()["type"] == "http.disconnect":
            raise ClientDisconnect

    def forget(self) -> None:
        """Ends the watch."""
        self._next.cancel()


async def _receive(receive: Receive) -> Message:
    return await receive()


@contextmanager
def watch(receive: Receive) -> Iterator[Caller]:
    """The caller, watched until the block ends."""
    caller = Caller(receive)
    try:
        yield caller
    finally:
        caller.forget()

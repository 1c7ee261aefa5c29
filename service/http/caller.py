"""Notices when the caller closes the connection. Knows ASGI's receive channel; nothing of the work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive


@contextmanager
def watch_caller(receive: Receive, on_left: Callable[[], None]) -> Iterator[None]:
    """Calls `on_left` if the caller closes the connection while the block runs. The body must have been read.

    A receive channel that fails counts as closed.

    A single task waits for that: `Request.is_disconnected` opens and cancels a scope at every call, which
    costs more than everything else that the event loop does for a small image.
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


@contextmanager
def ended_by_caller(receive: Receive) -> Iterator[None]:
    """Cancels the block once the caller closes the connection, and raises `ClientDisconnect` in its place.

    The body must have been read. For work that has no other end than its own.
    """
    task = asyncio.current_task()
    assert task is not None, "called outside of a task"
    has_left = is_over = False

    def on_left() -> None:
        nonlocal has_left
        if not is_over:
            has_left = True
            task.cancel()

    try:
        with watch_caller(receive, on_left):
            yield
    except asyncio.CancelledError:
        if has_left and task.uncancel() == 0:  # else the server cancelled it, too
            raise ClientDisconnect from None
        raise
    finally:
        is_over = True

"""What Ray Serve's proxy does to a request that a server of our own does not, put right around the app.

Plain ASGI. Knows nothing of Ray, images or models.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_DISCONNECT: Message = {"type": "http.disconnect"}


class BehindServe:
    """Wraps the app.

    - Serve cancels a request whose caller left, or fails to receive more of it. The app would take the first
      for the end of the server, and the second for a fault of its own. It is told that the caller left, and
      ends the request itself.
    - Serve adds the request's id to every answer, so the app's own, which is the same, is left out.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        left = asyncio.Event()

        async def receive_until_left() -> Message:
            return await _first(receive, left)

        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.get("headers", ())
                message = {**message, "headers": [pair for pair in headers if pair[0] != b"x-request-id"]}
            await send(message)

        answering = asyncio.create_task(self._answer(scope, receive_until_left, send_without_id))
        try:
            await asyncio.shield(answering)
        except asyncio.CancelledError:
            left.set()
            await answering
            raise

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


async def _first(receive: Receive, left: asyncio.Event) -> Message:
    """The next message, or a disconnect once the caller has left."""
    receiving = asyncio.ensure_future(_next(receive))
    leaving = asyncio.create_task(left.wait())
    try:
        await asyncio.wait((receiving, leaving), return_when=asyncio.FIRST_COMPLETED)
        return receiving.result() if receiving.done() and not left.is_set() else _DISCONNECT
    finally:
        receiving.cancel()
        leaving.cancel()


async def _next(receive: Receive) -> Message:
    try:
        return await receive()
    except Exception:  # of whatever kind: the way to the caller is gone
        return _DISCONNECT

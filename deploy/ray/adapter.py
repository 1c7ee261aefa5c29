"""Wraps the app to undo what Ray Serve's proxy does differently from our own server.

Plain ASGI. Knows nothing of Ray's interface, images or models.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_DISCONNECT: Message = {"type": "http.disconnect"}


class BehindServe:
    """Wraps the app.

    - If a client disconnects, Serve cancels the request, or its `receive` raises an error. To the app, the
    first means that the server stops, and the second that the app has a fault. So the app gets a disconnect
    message instead, and ends the request itself. - Serve adds the request id to every answer, so the same
    header of the app is removed.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        disconnected = asyncio.Event()

        async def receive_or_disconnect() -> Message:
            return await _first(receive, disconnected)

        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.get("headers", ())
                message = {**message, "headers": [pair for pair in headers if pair[0] != b"x-request-id"]}
            await send(message)

        answering = asyncio.create_task(self._answer(scope, receive_or_disconnect, send_without_id))
        try:
            await asyncio.shield(answering)
        except asyncio.CancelledError:
            disconnected.set()
            await answering
            raise

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


async def _first(receive: Receive, disconnected: asyncio.Event) -> Message:
    """The next message, or a disconnect message once the client has disconnected."""
    receiving = asyncio.ensure_future(_next(receive))
    waiting = asyncio.create_task(disconnected.wait())
    try:
        await asyncio.wait((receiving, waiting), return_when=asyncio.FIRST_COMPLETED)
        return receiving.result() if receiving.done() and not disconnected.is_set() else _DISCONNECT
    finally:
        receiving.cancel()
        waiting.cancel()


async def _next(receive: Receive) -> Message:
    try:
        return await receive()
    except Exception:  # Serve documents no type; any error means that the client cannot be reached
        return _DISCONNECT

"""Refuses requests that would be refused anyway, before any work is done for them.

A refusal by an overloaded server must be cheap. Knows paths; knows nothing of the reasons to refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Receive, Scope, Send


class EarlyRefusalMiddleware:
    """Calls `check`, which raises `ApiError`, before requests to `paths` reach the app."""

    def __init__(self, app: ASGIApp, paths: Collection[str], check: Callable[[], None]) -> None:
        self._app = app
        self._paths = frozenset(paths)
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in self._paths:
            self._check()
        await self._app(scope, receive, send)

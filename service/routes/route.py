"""The kind of route that all routes are: described in OpenAPI like FastAPI's own, called like Starlette's."""

from __future__ import annotations

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send


class RawRoute(APIRoute):
    """Hands the request to the endpoint as it is: no dependency, no model built or checked on the way."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)  # says which are allowed
            return
        response = await self.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)

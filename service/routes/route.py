"""The class of all routes: described in OpenAPI like FastAPI's, called like Starlette's."""

from __future__ import annotations

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send


class RawRoute(APIRoute):
    """Passes the request on to the endpoint as it is, without dependencies and without models to validate."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)  # raises 405 with the methods that are allowed
            return
        response = await self.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)

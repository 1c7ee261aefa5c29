"""The kind of route that all routes are: described in OpenAPI like FastAPI's own, called like Starlette's."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute


class RawRoute(APIRoute):
    """Hands the request to the endpoint as it is: no dependency, no model built or checked on the way."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint

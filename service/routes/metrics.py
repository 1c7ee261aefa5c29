"""`/metrics` for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from service.metrics import Collects, render

PATH = "/metrics"


def add_routes(router: APIRouter, gather: Callable[[], Awaitable[Collects]]) -> None:
    async def metrics(request: Request) -> Response:
        accept = request.headers.get("accept")
        # In the event loop's own threads, as all decode threads may be busy.
        body, content_type = await asyncio.to_thread(render, await gather(), accept)
        return Response(body, headers={"content-type": content_type})

    router.add_api_route(
        PATH,
        metrics,
        summary="Metrics as Prometheus text, or as OpenMetrics if the Accept header asks for it",
        response_class=PlainTextResponse,
        tags=["metrics"],
    )

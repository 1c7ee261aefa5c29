"""`/metrics` for Prometheus."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry

from service.metrics import render

PATH = "/metrics"


def add_routes(router: APIRouter, registry: CollectorRegistry) -> None:
    async def metrics(request: Request) -> Response:
        accept = request.headers.get("accept")
        # A thread of the loop's own pool: those that decode images may all be busy.
        body, content_type = await asyncio.to_thread(render, registry, accept)
        return Response(body, headers={"content-type": content_type})

    router.add_api_route(
        PATH,
        metrics,
        summary="Metrics as Prometheus text, or as OpenMetrics where the Accept header asks for it",
        response_class=PlainTextResponse,
        tags=["metrics"],
    )

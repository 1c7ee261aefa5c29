"""Probes for an orchestrator. They never touch the device."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from service.engine.engine import Engine
from service.routes.openapi import error_responses
from service.routes.schemas import Status

LIVE = "/healthz"
READY = ("/readyz", "/health")
PATHS = (LIVE, *READY)

_OK = Status().model_dump_json().encode()


def add_routes(router: APIRouter, engine: Engine) -> None:
    async def live(request: Request) -> Response:
        engine.check_alive()
        return Response(_OK, media_type="application/json")

    async def ready(request: Request) -> Response:
        engine.check_ready()
        return Response(_OK, media_type="application/json")

    router.add_api_route(
        LIVE,
        live,
        summary="Liveness: 503 once only a restart of the process helps",
        responses={200: {"model": Status}, **error_responses(503)},
        tags=["probes"],
    )
    for path in READY:
        router.add_api_route(
            path,
            ready,
            summary="Readiness: 503 while loading, while shutting down, and once a device failed",
            responses={200: {"model": Status}, **error_responses(503)},
            tags=["probes"],
        )

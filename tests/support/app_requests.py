"""Requests that several tests of the app send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import httpx
from prometheus_client import CollectorRegistry

from service.app import create_app
from service.config.settings import Settings
from service.engine.engine import State
from tests.support.app import (
    Service,
)

Serve = Callable[..., Service]


async def post(service: Service, image: bytes) -> httpx.Response:
    transport = httpx.ASGITransport(service.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://sidecar") as client:
        return await client.post("/embed", content=image, headers={"content-type": "image/png"})


def embed_at_once(service: Service, images: Sequence[bytes]) -> list[httpx.Response]:
    async def all_at_once() -> list[httpx.Response]:
        return await asyncio.gather(*[post(service, image) for image in images])

    return service.runner.run(all_at_once())


def running_demo(settings: Settings) -> Iterator[Service]:
    """The app with the demo model, as `vision-sidecar serve` makes it."""
    registry = CollectorRegistry()
    service = Service(create_app(settings, registry=registry), registry)
    service.start()
    service.wait_for(State.READY)
    yield service
    service.stop()

"""The app while it loads, fails, is full, or drains."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
import torch

from models import EncodeItem, ModelError
from service.config.settings import Settings
from service.engine.engine import State
from service.images.preparation import Preparation
from service.queue.ticket import Ticket
from tests.support.answers import error_of, message_of
from tests.support.app import (
    FakeEncoder,
    Service,
    encode_image,
    only,
)
from tests.support.app_requests import Serve
from tests.support.waiting import eventually


def test_callers_and_probes_are_told_of_a_lost_device(serve: Serve) -> None:
    def fail(items: Sequence[EncodeItem]) -> None:
        raise torch.AcceleratorError("illegal memory access")

    service = serve(encoders=[FakeEncoder(fail)])
    for _ in range(2):
        response = service.embed(encode_image())
        assert error_of(response) == (503, "device_failed", None)
        assert "must be restarted" in message_of(response)
    for probe in ("/healthz", "/readyz", "/health"):
        assert error_of(service.get(probe)) == (503, "device_failed", None)


def test_before_the_model_is_loaded_only_healthz_is_200(serve: Serve, gate: threading.Event) -> None:
    service = serve(load=gate.wait, state=State.LOADING)
    assert service.get("/healthz").status_code == 200
    for path in ("/readyz", "/health", "/info"):
        response = service.get(path)
        assert error_of(response) == (503, "not_ready", None)
        assert "still being loaded" in message_of(response)
        assert response.headers["retry-after"] == "5"
    for path in ("/v1/models", "/metrics", "/docs", "/openapi.json"):
        assert service.get(path).status_code == 200
    gate.set()
    service.wait_for(State.READY)
    for path in ("/healthz", "/readyz", "/health", "/info"):
        assert service.get(path).status_code == 200


def test_a_body_is_not_read_before_the_model_is_loaded(serve: Serve, gate: threading.Event) -> None:
    service = serve(load=gate.wait, state=State.LOADING)

    async def body() -> Any:
        raise AssertionError("read")
        yield b""

    response = service.request("POST", "/embed", content=body(), headers={"content-type": "image/png"})
    assert error_of(response) == (503, "not_ready", None)
    assert response.headers["retry-after"] == "5"


def test_a_model_that_cannot_be_loaded_fails_the_app(serve: Serve) -> None:
    def load() -> None:
        raise ModelError("no such folder")

    service = serve(load=load, state=State.FAILED)
    assert error_of(service.get("/healthz")) == (503, "device_failed", None)


def test_a_full_server_refuses_before_it_does_any_work(service: Service) -> None:
    batcher = service.engine.batcher

    async def fill() -> Ticket:
        filling = Ticket()
        batcher.reserve(filling, batcher.limit_tokens)
        return filling

    async def body() -> Any:
        raise AssertionError("read")
        yield b""

    filling = service.runner.run(fill())
    response = service.request("POST", "/embed", content=body(), headers={"content-type": "image/png"})
    assert error_of(response) == (429, "queue_full", None)
    assert 1 <= int(response.headers["retry-after"]) <= 10
    assert service.get("/readyz").status_code == 200
    assert service.metric("requests_total", route="/embed", status="429") == 1
    assert service.metric("errors_total", code="queue_full") == 1
    batcher.cancel(filling)
    assert service.embed(encode_image()).status_code == 200


def test_an_image_does_not_fit_until_others_are_taken(serve: Serve, settings: Settings) -> None:
    service = serve(only(settings, max_queue_tokens=6))
    assert error_of(service.embed_form(encode_image(), encode_image())) == (413, "too_many_tokens", None)
    assert service.embed(encode_image()).status_code == 200
    for name in ("queue_images", "queue_tokens", "inflight_bytes"):
        assert service.metric(name) == 0
    assert service.metric("queue_limit_tokens") == 6


def test_announced_bytes_that_are_not_sent_take_no_room(serve: Serve, settings: Settings) -> None:
    service = serve(only(settings, max_inflight_bytes=2**26))
    over = asyncio.Event()

    async def silent() -> AsyncIterator[bytes]:
        await over.wait()
        yield b"x"

    async def main() -> list[httpx.Response]:
        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://sidecar") as client:
            headers = {"content-type": "image/png", "content-length": str(2**24)}
            waiting = [
                asyncio.create_task(client.post("/embed", content=silent(), headers=headers))
                for _ in range(8)
            ]
            await asyncio.sleep(0.05)
            image = await client.post("/embed", content=encode_image(), headers={"content-type": "image/png"})
            over.set()
            return [image, *await asyncio.gather(*waiting)]

    image, *others = service.runner.run(main())
    assert image.status_code == 200
    assert {answer.status_code for answer in others} == {400}
    assert service.metric("inflight_bytes") == 0


@pytest.mark.parametrize("num_images", [1, 3])
def test_failed_request_keeps_no_image_in_memory(num_images: int, service: Service) -> None:
    """No garbage collection may be needed: until then its bytes would be in memory but not in the budget."""
    broken = encode_image()[:-40]

    def left_behind() -> int:
        return sum(type(thing) is Preparation for thing in gc.get_objects())

    gc.collect()
    before = left_behind()
    gc.disable()
    try:
        for _ in range(5):
            answer = service.embed(broken) if num_images == 1 else service.embed_form(*[broken] * num_images)
            assert answer.status_code == 400
        eventually(lambda: left_behind() == before)
    finally:
        gc.enable()


def test_draining_refuses_newcomers(service: Service) -> None:
    service.engine.drain()
    assert service.get("/healthz").status_code == 200
    assert error_of(service.get("/readyz")) == (503, "draining", None)
    response = service.embed(encode_image())
    assert error_of(response) == (503, "draining", None)
    assert response.headers["retry-after"] == "5"

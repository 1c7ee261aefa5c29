"""The app with the demo model, and with several replicas."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import cast

import httpx
import numpy as np
import pytest
import torch

from models import EncodeItem, VisionEncoder
from models.replica import MAX_LAUNCHED
from service.config.settings import Settings
from service.images.image_file import ImageLimits, read_header
from service.metrics import MISS_REASONS
from tests.support.answers import error_of, from_vllm
from tests.support.app import (
    FakeEncoder,
    FakeGraphs,
    Service,
    encode_image,
    only,
)
from tests.support.app_requests import Serve, embed_at_once, post, running_demo
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def two_demos() -> Iterator[Service]:
    settings = Settings(decode_threads=2, device="cpu", max_pixels=65536 * 2, data_parallel_size=2)
    yield from running_demo(settings)


def test_demo_embeddings_are_unit_vectors_that_do_not_depend_on_the_request(demo: Service) -> None:
    images = [encode_image(200, 300, seed=1), encode_image(300, 200, seed=2)]
    alone = [demo.embed(image).json()["data"][0]["embedding"] for image in images]
    together = [entry["embedding"] for entry in demo.embed_form(*images).json()["data"]]
    for one, other in zip(alone, together, strict=True):
        assert np.linalg.norm(one) == pytest.approx(1, abs=1e-5)
        assert one == pytest.approx(other, abs=1e-5)
    assert alone[0] != pytest.approx(alone[1], abs=1e-3)


def test_demo_mean_is_the_mean_of_the_tokens_main_columns(demo: Service) -> None:
    image = encode_image(200, 300)
    mean = demo.embed(image, "?normalize=false").json()["data"][0]["embedding"]
    tokens = demo.embed(image, "?pooling=none").json()["data"][0]["embedding"]
    deep = demo.embed(image, "?pooling=none&deepstack=true&encoding_format=base64").json()["data"][0]
    array = np.frombuffer(base64.b64decode(deep["embedding"]), "<f4").reshape(deep["shape"])
    info = demo.get("/info").json()
    assert array.shape == (deep["num_tokens"], info["width"])
    assert array[:, : info["hidden_size"]] == pytest.approx(np.array(tokens), abs=1e-5)
    assert np.mean(tokens, axis=0) == pytest.approx(np.array(mean), abs=1e-5)


def test_demo_uses_the_pixel_limits_of_the_settings(demo: Service) -> None:
    assert demo.get("/info").json()["preprocessing"]["max_pixels"] == 65536 * 2
    assert demo.embed(encode_image(1000, 1000, format="JPEG")).json()["usage"]["num_tokens"] <= 128


def hits_and_misses(service: Service, device: str) -> int:
    """The number of images that ran on a device."""
    misses = (
        service.metric("encoder_cudagraph_misses_total", device=device, reason=reason)
        for reason in MISS_REASONS
    )
    return int(service.metric("encoder_cudagraph_hits_total", device=device) + sum(misses))


def test_two_replicas_share_a_request_and_answer_in_order(demo: Service, two_demos: Service) -> None:
    assert two_demos.get("/info").json()["devices"] == ["cpu:0", "cpu:1"]
    images = [encode_image(200 + 40 * n, 300, seed=n) for n in range(5)]
    before = [hits_and_misses(two_demos, device) for device in ("cpu:0", "cpu:1")]
    shared = two_demos.embed_form(*images).json()
    alone = demo.embed_form(*images).json()
    assert [entry["sha256"] for entry in shared["data"]] == [entry["sha256"] for entry in alone["data"]]
    for ours, theirs in zip(shared["data"], alone["data"], strict=True):
        assert ours["embedding"] == pytest.approx(theirs["embedding"], abs=1e-5)
    after = [hits_and_misses(two_demos, device) for device in ("cpu:0", "cpu:1")]
    ran = [b - a for a, b in zip(before, after, strict=True)]
    assert sum(ran) == 5
    assert min(ran) >= 2


def test_metrics_of_two_replicas_sum_up(two_demos: Service) -> None:
    two_demos.embed_form(*[encode_image(seed=n) for n in range(4)])
    devices = ("cpu:0", "cpu:1")
    assert [two_demos.metric("device_up", device=device) for device in devices] == [1, 1]
    assert sum(hits_and_misses(two_demos, device) for device in devices) == two_demos.metric("images_total")
    assert all(two_demos.metric("device_busy_seconds_total", device=device) > 0 for device in devices)


def test_requests_of_one_image_are_spread_over_the_replicas(serve: Serve, settings: Settings) -> None:
    busy = [threading.Event(), threading.Event()]

    def wait_for_the_other(own: threading.Event, items: Sequence[EncodeItem]) -> None:
        own.set()
        assert all(event.wait(10) for event in busy)

    encoders = [FakeEncoder(partial(wait_for_the_other, own)) for own in busy]
    service = serve(only(settings, max_batch_tokens=6), encoders=encoders)
    images = [encode_image(seed=n) for n in range(MAX_LAUNCHED + 1)]
    assert [response.status_code for response in embed_at_once(service, images)] == [200] * len(images)
    assert min(len(encoder.batches) for encoder in encoders) >= 1


def test_a_lost_replica_is_reported_and_the_others_finish(serve: Serve, gate: threading.Event) -> None:
    def lose(items: Sequence[EncodeItem]) -> None:
        raise torch.AcceleratorError("illegal memory access")

    def hold(items: Sequence[EncodeItem]) -> None:
        assert gate.wait(10)

    service = serve(encoders=[FakeEncoder(hold), FakeEncoder(lose)])

    async def requests() -> list[httpx.Response]:
        """Holds images on the first device until the second device has one."""
        sent: list[asyncio.Task[httpx.Response]] = []
        while not any(task.done() for task in sent):
            sent.append(asyncio.create_task(post(service, encode_image())))
            await asyncio.sleep(0.05)
        gate.set()
        return await asyncio.gather(*sent)

    answers = service.runner.run(requests())
    lost = [answer for answer in answers if answer.status_code != 200]
    assert {error_of(answer) for answer in lost} == {(503, "device_failed", None)}
    assert len(service.encoders[0].batches) == len(answers) - len(lost)
    assert error_of(service.get("/healthz")) == (503, "device_failed", None)
    assert service.metric("device_up", device="fake:0") == 1
    assert service.metric("device_up", device="fake:1") == 0


def test_request_with_one_image_on_a_lost_replica_fails(serve: Serve, settings: Settings) -> None:
    lost = threading.Event()

    def hold(items: Sequence[EncodeItem]) -> None:
        assert lost.wait(10)  # so that it cannot take all images, even if the other device is late

    def lose(items: Sequence[EncodeItem]) -> None:
        lost.set()
        raise torch.AcceleratorError("illegal memory access")

    of_one_image = only(settings, max_batch_tokens=6)
    service = serve(of_one_image, encoders=[FakeEncoder(hold), FakeEncoder(lose)])
    assert error_of(service.embed_form(*[encode_image()] * 6)) == (503, "device_failed", None)
    eventually(lambda: service.engine.is_idle)


def test_replays_and_padding_are_counted(serve: Serve) -> None:
    service = serve(encoders=[FakeEncoder(graphs=FakeGraphs({64: None, 128: None}, 16, 2**20, 1.5))])
    assert service.metric("encoder_cudagraph_replays_total", device="fake", budget="64") == 0
    assert service.metric("encoder_cudagraph_memory_bytes", device="fake") == 2**20
    assert service.metric("encoder_cudagraph_capture_seconds", device="fake") == 1.5
    service.embed_form(encode_image(), encode_image())  # 2 · 6 tokens
    assert service.metric("encoder_cudagraph_hits_total", device="fake") == 2
    assert service.metric("encoder_cudagraph_replays_total", device="fake", budget="64") == 1
    assert service.metric("encoder_cudagraph_replays_total", device="fake", budget="128") == 0
    assert service.metric("encoder_padding_tokens_total") == 64 - 12


def test_vllm_gets_the_encoders_own_bfloat16_to_the_bit() -> None:
    settings = Settings(decode_threads=2, device="cpu", max_pixels=65536 * 2, dtype="bfloat16")
    for service in running_demo(settings):
        response = service.embed(encode_image(200, 300), "?format=vllm")
        [tokens] = from_vllm(response.content)
        encoder = cast(VisionEncoder, service.engine.encoder)
        rgb = read_header(encode_image(200, 300), ImageLimits(10**7, 10**7)).decode()
        [own] = encoder.encode([encoder.preprocess(rgb)])
        assert own.dtype == torch.bfloat16
        assert torch.equal(tokens.view(torch.int16), own.view(torch.int16))

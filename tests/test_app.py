from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import json
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast
from urllib.parse import urlencode

import httpx
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from models import EncodeItem, ModelError, OutputSpec, VisionEncoder
from models.replica import MAX_LAUNCHED
from service.app import COUNTED_ROUTES, create_app
from service.config.settings import Settings
from service.engine.engine import State
from service.images.image_file import ImageLimits, read_header
from service.images.preparation import Preparation
from service.intake.options import OPTION_NAMES
from service.metrics import MISS_REASONS
from service.queue.ticket import Ticket
from service.routes.openapi import PIXEL
from service.routes.schemas import EmbedResponse, Info, ModelCard, ModelList, OpenAIResponse
from tests.support.answers import error_of, from_safetensors, from_vllm, message_of
from tests.support.app import (
    FINGERPRINT,
    HIDDEN_SIZE,
    FakeEncoder,
    FakeGraphs,
    FakeRunning,
    Service,
    encode_image,
    known_embedding,
    only,
)
from tests.support.waiting import eventually

Serve = Callable[..., Service]


async def post(service: Service, image: bytes) -> httpx.Response:
    transport = httpx.ASGITransport(service.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://sidecar") as client:
        return await client.post("/embed", content=image, headers={"content-type": "image/png"})


def embed_at_once(service: Service, images: Sequence[bytes]) -> list[httpx.Response]:
    async def all_at_once() -> list[httpx.Response]:
        return await asyncio.gather(*[post(service, image) for image in images])

    return service.runner.run(all_at_once())


def test_embed_answers_the_embedding_of_an_image(service: Service) -> None:
    image = encode_image()
    response = service.embed(image)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    body = EmbedResponse.model_validate_json(response.content)
    [entry] = body.data
    [[item]] = service.encoder.batches
    assert entry.embedding == pytest.approx(known_embedding(item.patches, item.output).tolist())
    assert item.output == OutputSpec(pooled=True, normalize=True, deepstack=False, dtype=torch.float32)
    assert np.linalg.norm(entry.embedding) == pytest.approx(1)
    assert (body.model, body.fingerprint, entry.sha256) == (
        "demo",
        FINGERPRINT,
        hashlib.sha256(image).hexdigest(),
    )
    timing = re.findall(r"(\w+);dur=[0-9.]+", response.headers["server-timing"])
    assert timing == ["read", "decode", "queue", "encode", "serialize", "total"]


def test_the_three_forms_of_a_body_give_the_same_answer(service: Service) -> None:
    image = encode_image()
    raw = service.embed(image, "?normalize=false").json()
    form = service.embed_form(image, normalize="false").json()
    text = base64.b64encode(image).decode()
    json_body = service.request("POST", "/embed", json={"images": text, "normalize": False}).json()
    assert raw["data"] == form["data"] == json_body["data"]


def test_all_options_reach_the_encoder(service: Service) -> None:
    query = "?pooling=none&deepstack=true&dtype=float16&encoding_format=base64&format=json"
    body = EmbedResponse.model_validate_json(service.embed(encode_image(), query).content)
    [[item]] = service.encoder.batches
    assert item.output == OutputSpec(deepstack=True, dtype=torch.float16)
    assert (body.dtype, body.data[0].shape) == ("float16", [6, HIDDEN_SIZE * 3])
    assert isinstance(body.data[0].embedding, str)


@pytest.mark.parametrize(
    ("query", "headers", "expected", "message"),
    [
        ("?poling=mean", {}, (400, "invalid_option", "poling"), 'unknown query parameter "poling"'),
        ("?pooling=max", {}, (400, "invalid_option", "pooling"), 'must be mean or none, not "max"'),
        ("?deepstack=1", {}, (400, "option_conflict", "deepstack"), "pooling=none only"),
        ("?format=npz", {}, (400, "invalid_option", "format"), 'or npy or vllm, not "npz"'),
        ("", {"accept": "text/html"}, (406, "not_acceptable", None), "answers application/json"),
        ("", {"accept": "," * 5000}, (431, "headers_too_large", None), "the Accept header has more than"),
        ("", {"content_type": "image/png" + ";" * 1100}, (431, "headers_too_large", None), "Content-Type"),
        (
            "",
            {"content_type": "text/plain"},
            (415, "unsupported_content_type", None),
            "text/plain is not served; served are image/*",
        ),
        ("", {"content_type": "application/json"}, (400, "invalid_json", None), "not UTF-8"),
        (
            "",
            {"content_encoding": "gzip"},
            (415, "unsupported_content_type", None),
            "without Content-Encoding",
        ),
    ],
)
def test_refusals_of_embed(
    query: str,
    headers: dict[str, str],
    expected: tuple[int, str, str | None],
    message: str,
    service: Service,
) -> None:
    response = service.embed(encode_image(), query, **headers)
    assert error_of(response) == expected
    assert message in message_of(response)
    assert service.encoder.batches == []
    assert service.metric("errors_total", code=expected[1]) == 1
    assert service.metric("requests_total", route="/embed", status=str(expected[0])) == 1


def test_if_one_image_fails_the_request_fails_and_names_it(service: Service) -> None:
    response = service.embed_form(encode_image(), b"no image", encode_image())
    assert error_of(response) == (400, "invalid_image", "images[1]")
    assert "not an image; the formats served are JPEG" in message_of(response)
    assert service.encoder.batches == []


TEXT = st.text(st.characters(codec=None, categories=None), max_size=70)


@hypothesis_settings(
    derandomize=True,
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    document=st.dictionaries(
        st.sampled_from(["images", *OPTION_NAMES]) | TEXT,
        TEXT | st.booleans() | st.lists(TEXT | st.fixed_dictionaries({"data": TEXT}), max_size=2),
        max_size=3,
    ),
    name=TEXT,
)
@example(document={"images": PIXEL, "pooling": "\ud800"}, name="pooling")
@example(document={"images": PIXEL, "\ud800": "x"}, name="\udfff")
@example(document={"images": {"data": PIXEL, "\ud800": "x"}}, name="dtype")
@example(document={"images": "\ud800"}, name="x")
def test_error_about_any_text_of_a_client_can_be_sent(
    document: dict[str, object], name: str, service: Service
) -> None:
    response = service.embed(json.dumps(document).encode(), content_type="application/json")
    assert response.status_code in (200, 400, 413, 422)
    query = urlencode({name: name}, errors="surrogatepass")
    response = service.embed(encode_image(), f"?{query}")
    assert error_of(response)[0] == 400
    assert response.content.isascii()


@pytest.mark.parametrize(
    ("changes", "expected", "message"),
    [
        ({"max_body_bytes": 1000, "max_image_bytes": 1000}, (413, "body_too_large", None), "1000 bytes"),
        ({"max_image_bytes": 1000}, (413, "image_too_large", "images[0]"), "1000 bytes"),
        ({"max_image_pixels": 1000}, (413, "too_many_pixels", "images[0]"), "6,144 pixels (96 x 64)"),
        ({"max_images_per_request": 1}, (413, "too_many_images", "images"), "1 images allowed"),
        (
            {"max_request_tokens": 5},
            (413, "too_many_tokens", "images[0]"),
            "6 tokens, and a request",
        ),
    ],
)
def test_every_limit_of_the_settings_holds(
    changes: dict[str, int],
    expected: tuple[int, str, str | None],
    message: str,
    serve: Serve,
    settings: Settings,
) -> None:
    response = serve(only(settings, **changes)).embed_form(encode_image(), encode_image())
    assert error_of(response) == expected
    assert message in message_of(response)


def test_numbers_that_are_not_finite_are_an_error(serve: Serve) -> None:
    class Broken(FakeEncoder):
        def launch(self, items: Sequence[EncodeItem]) -> FakeRunning:
            result = super().launch(items).wait()
            result.embeddings[0][0] = float("nan")
            return FakeRunning(lambda: result)

    service = serve(encoders=[Broken()])
    assert error_of(service.embed(encode_image())) == (500, "non_finite_output", "images[0]")


def test_a_batch_that_fails_is_an_internal_error_and_the_next_one_works(serve: Serve) -> None:
    failing = [True]

    def fail(items: Sequence[EncodeItem]) -> None:
        if failing.pop() if failing else False:
            raise RuntimeError("/secret/path")

    service = serve(encoders=[FakeEncoder(fail)])
    response = service.embed(encode_image())
    assert error_of(response) == (500, "internal_error", "images[0]")
    assert message_of(response) == "the encoder failed on this image"
    assert "secret" not in response.text
    assert service.embed(encode_image()).status_code == 200


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


def test_info_says_what_is_served(serve: Serve, settings: Settings) -> None:
    service = serve(only(settings, served_model_name="mine", max_request_tokens=77))
    info = Info.model_validate_json(service.get("/info").content)
    assert (info.model, info.demo, info.revision, info.fingerprint) == ("mine", True, "abc123", FINGERPRINT)
    assert (info.dtype, info.devices, info.attn_backend) == ("float32", ("fake",), "FAKE")
    assert info.encoder_cudagraph.model_dump() == {
        "enabled": False,
        "token_budgets": (),
        "max_images_per_batch": 0,
    }
    assert (info.hidden_size, info.width, info.num_deepstack) == (4, 12, 2)
    assert (info.limits.max_request_tokens, info.limits.max_images_per_request) == (77, 32)
    assert (info.preprocessing.patch_size, info.preprocessing.min_pixels) == (16, 1024)
    assert info.preprocessing.mean == (0.5, 0.5, 0.5)


def test_info_says_which_graphs_were_captured(serve: Serve) -> None:
    graphs = FakeGraphs({128: None, 64: None}, max_images=4)
    service = serve(encoders=[FakeEncoder(graphs=graphs), FakeEncoder(graphs=graphs)])
    info = Info.model_validate_json(service.get("/info").content)
    assert info.devices == ("fake:0", "fake:1")
    assert info.encoder_cudagraph.model_dump() == {
        "enabled": True,
        "token_budgets": (64, 128),
        "max_images_per_batch": 4,
    }


def test_models_are_listed_in_the_shape_of_openai(serve: Serve, settings: Settings) -> None:
    service = serve(only(settings, served_model_name="mine"))
    listed = ModelList.model_validate_json(service.get("/v1/models").content)
    assert [(card.id, card.object) for card in listed.data] == [("mine", "model")]


@pytest.mark.parametrize(
    "path", ["/", "/nope", "/embed/", "/Embed", "/docs/", "/docs/nope.js", "/redoc", "//embed"]
)
def test_an_unknown_path_is_404(path: str, service: Service) -> None:
    response = service.request("POST", f"http://sidecar{path}")
    assert error_of(response) == (404, "not_found", None)
    assert "/docs lists the paths" in message_of(response)
    assert response.headers["vary"] == "Accept"
    assert service.metric("requests_total", route="other", status="404") == 1


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/embed", "POST"),
        ("HEAD", "/embed", "POST"),
        ("PUT", "/embed", "POST"),
        ("OPTIONS", "/embed", "POST"),
        ("POST", "/info", "GET, HEAD"),
        ("DELETE", "/healthz", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_405(method: str, path: str, allow: str, service: Service) -> None:
    response = service.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"] == allow
    if method != "HEAD":
        assert error_of(response) == (405, "method_not_allowed", None)
        assert message_of(response) == f"{path} takes {allow}"


@pytest.mark.parametrize(
    "path", ["/healthz", "/readyz", "/info", "/v1/models", "/metrics", "/docs", "/openapi.json"]
)
def test_head_answers_like_get_without_a_body(path: str, service: Service) -> None:
    head, get = service.request("HEAD", path), service.get(path)
    assert head.status_code == get.status_code == 200
    assert head.headers["content-type"] == get.headers["content-type"]
    assert head.content == b""


def test_metrics_count_requests_images_and_batches(service: Service) -> None:
    service.embed_form(encode_image(), encode_image())
    service.get("/nope")
    service.get("/healthz")
    response = service.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert samples["vision_sidecar_requests_total", "/embed", "200"] == 1
    assert samples["vision_sidecar_requests_total", "other", "404"] == 1
    assert samples["vision_sidecar_request_duration_seconds_count", "/embed"] == 1
    assert samples["vision_sidecar_images_total",] == 2
    assert samples["vision_sidecar_image_tokens_total",] == 12
    assert samples["vision_sidecar_errors_total", "not_found"] == 1
    assert samples["vision_sidecar_ready",] == 1
    for stage in ("read", "decode", "queue", "encode", "serialize"):
        assert samples["vision_sidecar_stage_duration_seconds_count", stage] == 1
    assert not any("/healthz" in key for key in samples)


def test_accept_header_selects_openmetrics(service: Service) -> None:
    response = service.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


def test_two_apps_share_nothing(serve: Serve) -> None:
    one, other = serve(), serve()
    one.embed(encode_image())
    assert (one.metric("images_total"), other.metric("images_total")) == (1, 0)


def test_requests_at_the_same_time_get_their_own_answers(service: Service) -> None:
    images = [encode_image(64, 32 * n, seed=n) for n in range(1, 13)]
    for image, response in zip(images, embed_at_once(service, images), strict=True):
        [entry] = response.json()["data"]
        assert entry["sha256"] == hashlib.sha256(image).hexdigest()
        assert entry["embedding"] == pytest.approx(service.embed(image).json()["data"][0]["embedding"])


def test_metrics_are_written_off_the_event_loop(service: Service) -> None:
    threads = []

    class Watching(Collector):
        def collect(self) -> Iterator[Metric]:
            threads.append(threading.current_thread())
            yield from ()

    service.registry.register(Watching())
    threads.clear()
    service.get("/metrics")
    assert len(threads) == 1
    assert threading.main_thread() not in threads


def test_the_demo_model_is_named_as_such(
    serve: Serve, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    service = serve()
    assert "random" in service.get("/openapi.json").json()["info"]["description"]
    assert [record.levelname for record in caplog.records if "random" in record.getMessage()] == ["WARNING"]
    caplog.clear()
    service = serve(only(settings, model="org/model"))
    assert "random" not in service.get("/openapi.json").json()["info"]["description"]
    assert service.get("/info").json()["demo"] is False
    assert "random" not in caplog.text


def test_counted_routes_are_those_that_the_app_has(service: Service) -> None:
    from_schema = {path.replace("}", ":path}") for path in service.get("/openapi.json").json()["paths"]}
    assert from_schema - {"/healthz", "/readyz", "/health"} <= set(COUNTED_ROUTES)
    for route in COUNTED_ROUTES:
        assert service.get(route.replace("{model_id:path}", "demo")).status_code in (200, 405)


def running_demo(settings: Settings) -> Iterator[Service]:
    """The app with the demo model, as `vision-sidecar serve` makes it."""
    registry = CollectorRegistry()
    service = Service(create_app(settings, registry=registry), registry)
    service.start()
    service.wait_for(State.READY)
    yield service
    service.stop()


@pytest.fixture(scope="module")
def demo() -> Iterator[Service]:
    yield from running_demo(Settings(decode_threads=2, device="cpu", max_pixels=65536 * 2))


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


@pytest.mark.parametrize("form", ["safetensors", "npy", "vllm"])
def test_every_format_answers_several_images_or_refuses_them(form: str, service: Service) -> None:
    response = service.embed_form(encode_image(), encode_image(64, 64), query=f"?format={form}&pooling=none")
    if form == "npy":
        assert error_of(response) == (400, "option_conflict", "format")
        assert service.encoder.batches == []
        return
    read = from_safetensors if form == "safetensors" else from_vllm
    assert [len(tokens) for tokens in read(response.content)] == [6, 4]


def openai_embed(service: Service, document: object, **headers: str) -> httpx.Response:
    return service.request("POST", "/v1/embeddings?api-version=1", json=document, headers=headers)


def test_openai_route_has_its_own_shape_and_counts(service: Service) -> None:
    text = base64.b64encode(encode_image()).decode()
    response = openai_embed(service, {"model": "demo", "input": [text, {"image": text}]})
    body = OpenAIResponse.model_validate_json(response.content)
    assert [entry.index for entry in body.data] == [0, 1]
    assert (body.model, body.usage.prompt_tokens, body.usage.total_tokens) == ("demo", 12, 12)
    assert service.metric("requests_total", route="/v1/embeddings", status="200") == 1
    assert service.metric("request_duration_seconds_count", route="/v1/embeddings") == 1


@pytest.mark.parametrize(
    ("document", "headers", "expected"),
    [
        ({"input": "a cat"}, {}, (400, "text_not_supported", "input[0]")),
        ({"input": [PIXEL, 5]}, {}, (400, "text_not_supported", "input[1]")),
        ([], {}, (400, "invalid_request", None)),
        ({}, {}, (400, "invalid_request", "input")),
        ({"input": []}, {}, (400, "empty_input", "input")),
        ({"input": [PIXEL, {"image": "data:,x"}]}, {}, (400, "invalid_image", "input[1]")),
        ({"input": [PIXEL] * 33}, {}, (413, "too_many_images", "input")),
        ({"input": PIXEL, "model": "gpt"}, {}, (404, "model_not_found", "model")),
        ({"input": PIXEL, "dimensions": 3}, {}, (400, "invalid_option", "dimensions")),
        ({"input": PIXEL, "encoding_format": "hex"}, {}, (400, "invalid_option", "encoding_format")),
        ({"input": PIXEL}, {"accept": "application/x-npy"}, (406, "not_acceptable", None)),
        ({"input": PIXEL}, {"accept": "," * 5000}, (431, "headers_too_large", None)),
        ({"input": PIXEL}, {"content-type": "a" * 1100}, (431, "headers_too_large", None)),
        ({"input": PIXEL}, {"content-type": "text/plain"}, (415, "unsupported_content_type", None)),
    ],
)
def test_refusals_of_the_openai_route(
    document: object, headers: dict[str, str], expected: tuple[int, str, str | None], service: Service
) -> None:
    assert error_of(openai_embed(service, document, **headers)) == expected
    assert service.encoder.batches == []
    assert service.metric("requests_total", route="/v1/embeddings", status=str(expected[0])) == 1


def test_the_openai_route_is_closed_while_the_server_is_not_ready(service: Service) -> None:
    service.engine.drain()
    assert error_of(openai_embed(service, {"input": PIXEL})) == (503, "draining", None)


def test_a_model_is_found_by_its_name_with_its_slash(serve: Serve, settings: Settings) -> None:
    service = serve(only(settings, served_model_name="org/mine"))
    for path in ("/v1/models/org/mine", "/v1/models/org%2Fmine"):
        assert ModelCard.model_validate_json(service.get(path).content).id == "org/mine"
    for path in ("/v1/models/mine", "/v1/models/", "/v1/models/org/mine/"):
        assert error_of(service.get(path)) == (404, "model_not_found", "model")
    assert service.metric("requests_total", route="/v1/models/{model_id:path}", status="200") == 2

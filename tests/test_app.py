"""The routes of the app around `/embed`."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from service.app import counted_routes
from service.config.settings import Settings
from service.routes.schemas import Info, ModelList
from tests.support.answers import error_of, message_of
from tests.support.app import (
    FINGERPRINT,
    FakeEncoder,
    FakeGraphs,
    Service,
    encode_image,
    only,
)
from tests.support.app_requests import Serve, embed_at_once


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
    "path", ["/nope", "/embed/", "/Embed", "/docs/", "/docs/nope.js", "/redoc", "//embed"]
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


def test_counted_routes_are_those_that_the_app_has(serve: Serve, with_store: Settings) -> None:
    service = serve(with_store)
    from_schema = {
        path.replace("{model_id}", "{model_id:path}") for path in service.get("/openapi.json").json()["paths"]
    }
    routes = counted_routes(with_store)
    assert from_schema - {"/healthz", "/readyz", "/health"} <= set(routes)
    for route in routes:
        answer = service.get(route.replace("{model_id:path}", "demo").replace("{name}", "page.js"))
        assert answer.status_code in (200, 405) or answer.json()["error"]["code"] == "handoff_not_found"

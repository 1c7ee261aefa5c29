from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from models import BatchStats
from service.errors import ERROR_CODES, HeadersTooLarge
from service.metrics import LLM_OUTCOMES, MISS_REASONS, STAGES, STATUSES, Metrics, render

P = "vision_sidecar_"
ROUTES = ("/embed", "/info")


def stats(
    device: str,
    num_images: int = 1,
    num_tokens: int = 64,
    *,
    hits: int = 0,
    misses: Mapping[str, int] = {},
    replays: Mapping[int, int] = {},
    padding_tokens: int = 0,
    busy_s: float = 0.1,
) -> BatchStats:
    return BatchStats(device, num_images, num_tokens, hits, misses, replays, padding_tokens, busy_s)


class Board:
    """Metrics on a registry of their own, and what they say."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry, ROUTES)

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(P + name, labels)

    def series(self) -> dict[str, set[tuple[tuple[str, str], ...]]]:
        """Label sets by sample name."""
        found: dict[str, set[tuple[tuple[str, str], ...]]] = {}
        for family in parse_text(render(self.registry, None)[0].decode()):
            for sample in family.samples:
                found.setdefault(sample.name, set()).add(tuple(sorted(sample.labels.items())))
        return found

    def buckets(self, name: str) -> list[str]:
        """Upper bounds of a histogram's buckets, in their order."""
        family = next(f for f in self.registry.collect() if f.name == P + name)
        return list(dict.fromkeys(s.labels["le"] for s in family.samples if s.name.endswith("_bucket")))


@pytest.fixture
def board() -> Board:
    return Board()


def _labels(name: str, values: tuple[str, ...]) -> set[tuple[tuple[str, str], ...]]:
    return {((name, value),) for value in values}


def test_label_sets_are_closed_and_start_at_0(board: Board) -> None:
    series = board.series()
    routes = (*ROUTES, "other")
    statuses = (*map(str, STATUSES), "other")
    assert series[P + "requests_total"] == {(("route", r), ("status", s)) for r in routes for s in statuses}
    assert series[P + "request_duration_seconds_count"] == _labels("route", routes)
    assert series[P + "stage_duration_seconds_count"] == _labels("stage", STAGES)
    assert series[P + "errors_total"] == _labels("code", ERROR_CODES)
    assert series[P + "llm_requests_total"] == _labels("status", LLM_OUTCOMES)
    for name in ("images_total", "image_tokens_total", "requests_in_flight", "ready", "batch_images_count"):
        assert board(name) == 0
    assert board("requests_total", route="/embed", status="499") == 0


def test_statuses_are_those_of_the_answers() -> None:
    assert (
        *(200, 204, 206, 400, 401, 404, 405, 406, 408, 413, 415, 422, 429, 431, 499, 500, 502, 503, 504),
    ) == STATUSES


def test_refusal_without_a_route_is_counted(board: Board) -> None:
    board.metrics.count_refusal(HeadersTooLarge("m"))
    assert board("requests_total", route="other", status="431") == 1
    assert board("errors_total", code="headers_too_large") == 1


def test_using_the_metrics_adds_no_series(board: Board) -> None:
    board.metrics.add_device("cuda:0")
    board.metrics.set_graphs("cuda:0", [64, 128], memory_bytes=1, capture_seconds=0.5)
    before = board.series()
    board.metrics.set_device_up("cuda:0", True)
    board.metrics.observe_request("/embed", 200, 0.1)
    board.metrics.observe_request("/nowhere", 418, 0.1)
    board.metrics.observe_stage("decode", 0.1)
    board.metrics.count_error("invalid_image")
    board.metrics.count_llm_request("418")
    board.metrics.observe_batch(stats("cuda:0", misses={"oversize": 1}))
    board.metrics.observe_batch(stats("cuda:0", hits=1, replays={64: 1}))
    assert board.series() == before


def test_the_help_of_requests_in_flight_says_that_the_scrape_counts(board: Board) -> None:
    [gauge] = [family for family in board.registry.collect() if family.name == P + "requests_in_flight"]
    assert "the scrape itself" in gauge.documentation


def test_names_are_those_of_the_contract(board: Board) -> None:
    board.metrics.add_device("cpu")
    board.metrics.set_info(model="m", fingerprint="f", dtype="d", attn_backend="a", version="v")
    kinds = {f.name.removeprefix(P): f.type for f in board.registry.collect() if f.name.startswith(P)}
    assert kinds == {
        "requests": "counter",
        "request_duration_seconds": "histogram",
        "stage_duration_seconds": "histogram",
        "images": "counter",
        "image_tokens": "counter",
        "encoder_cudagraph_hits": "counter",
        "encoder_cudagraph_misses": "counter",
        "encoder_cudagraph_replays": "counter",
        "encoder_padding_tokens": "counter",
        "encoder_cudagraph_memory_bytes": "gauge",
        "encoder_cudagraph_capture_seconds": "gauge",
        "device_busy_seconds": "counter",
        "device_up": "gauge",
        "batch_images": "histogram",
        "batch_tokens": "histogram",
        "queue_images": "gauge",
        "queue_tokens": "gauge",
        "queue_limit_tokens": "gauge",
        "inflight_bytes": "gauge",
        "requests_in_flight": "gauge",
        "errors": "counter",
        "cache_hits": "counter",
        "cache_misses": "counter",
        "handoff_bytes": "gauge",
        "handoff_entries": "gauge",
        "handoff_leased_bytes": "gauge",
        "handoff_evictions": "counter",
        "handoff_reads": "counter",
        "llm_requests": "counter",
        "ready": "gauge",
        "info": "gauge",
    }
    assert board("info", model="m", fingerprint="f", dtype="d", attn_backend="a", version="v") == 1


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("stage_duration_seconds", ".0002 .0005 .001 .002 .005 .01 .02 .05 .1 .2 .5 1 2 5 10 30"),
        ("request_duration_seconds", ".0025 .005 .01 .015 .02 .03 .05 .075 .1 .2 .5 1 2 5 10 30 60"),
        ("batch_images", "1 2 4 8 16 32 64 128 256"),
        ("batch_tokens", "64 128 256 512 1024 2048 4096 8192 16384 32768 65536"),
    ],
)
def test_buckets_are_those_of_the_contract(board: Board, name: str, bounds: str) -> None:
    assert [float(bound) for bound in board.buckets(name)] == [*map(float, bounds.split()), float("inf")]


@pytest.mark.parametrize(
    ("route", "status", "counted", "timed"),
    [
        ("/embed", 200, ("/embed", "200"), "/embed"),
        ("/embed", 499, ("/embed", "499"), None),
        ("/embed", 503, ("/embed", "503"), None),
        ("/nowhere", 404, ("other", "404"), None),
        ("/nowhere", 200, ("other", "200"), "other"),
        ("/info", 304, ("/info", "other"), None),
    ],
)
def test_requests_are_counted_and_only_2xx_timed(
    board: Board, route: str, status: int, counted: tuple[str, str], timed: str | None
) -> None:
    board.metrics.observe_request(route, status, 0.25)
    assert board("requests_total", route=counted[0], status=counted[1]) == 1
    for name in (*ROUTES, "other"):
        assert board("request_duration_seconds_sum", route=name) == (0.25 if name == timed else 0)


def test_stages_and_errors_are_recorded(board: Board) -> None:
    board.metrics.observe_stage("queue", 0.5)
    board.metrics.count_error("draining")
    assert board("stage_duration_seconds_sum", stage="queue") == 0.5
    assert board("errors_total", code="draining") == 1


def test_requests_to_the_llm_server_are_counted_by_their_end(board: Board) -> None:
    for status in ("200", "418", "200", "unreachable"):
        board.metrics.count_llm_request(status)
    for status, count in (("200", 2), ("other", 1), ("unreachable", 1), ("timeout", 0)):
        assert board("llm_requests_total", status=status) == count


def test_device_starts_at_0_when_it_is_added(board: Board) -> None:
    assert board("device_up", device="cuda:0") is None
    board.metrics.add_device("cuda:0")
    assert board("device_up", device="cuda:0") == 0
    assert board("device_busy_seconds_total", device="cuda:0") == 0
    assert board("encoder_cudagraph_hits_total", device="cuda:0") == 0
    for reason in MISS_REASONS:
        assert board("encoder_cudagraph_misses_total", device="cuda:0", reason=reason) == 0
    board.metrics.set_device_up("cuda:0", True)
    assert board("device_up", device="cuda:0") == 1
    board.metrics.set_device_up("cuda:0", False)
    assert board("device_up", device="cuda:0") == 0


def test_replays_start_at_0_for_the_budgets_that_were_captured(board: Board) -> None:
    for device in ("cuda:0", "cuda:1"):
        board.metrics.add_device(device)
        assert board("encoder_cudagraph_memory_bytes", device=device) == 0
        assert board("encoder_cudagraph_capture_seconds", device=device) == 0
    assert P + "encoder_cudagraph_replays_total" not in board.series()
    board.metrics.set_graphs("cuda:0", [64, 72], memory_bytes=2**30, capture_seconds=1.5)
    board.metrics.set_graphs("cuda:1", [], memory_bytes=0, capture_seconds=0)
    assert board.series()[P + "encoder_cudagraph_replays_total"] == {
        (("budget", budget), ("device", "cuda:0")) for budget in ("64", "72")
    }
    assert board("encoder_cudagraph_replays_total", device="cuda:0", budget="72") == 0
    assert board("encoder_cudagraph_memory_bytes", device="cuda:0") == 2**30
    assert board("encoder_cudagraph_capture_seconds", device="cuda:0") == 1.5


def test_batches_are_recorded_by_device(board: Board) -> None:
    for device in ("cuda:0", "cuda:1"):
        board.metrics.add_device(device)
        board.metrics.set_graphs(device, [64, 128], memory_bytes=1, capture_seconds=1)
    misses = {"oversize": 1, "disabled": 2}
    board.metrics.observe_batch(
        stats("cuda:1", 5, 700, hits=2, misses=misses, replays={128: 2}, padding_tokens=9, busy_s=0.25)
    )
    board.metrics.observe_batch(stats("cuda:0", hits=1, replays={64: 1}, padding_tokens=3, busy_s=0.5))
    assert (board("images_total"), board("image_tokens_total")) == (6, 764)
    assert board("encoder_cudagraph_hits_total", device="cuda:1") == 2
    assert board("encoder_cudagraph_misses_total", device="cuda:1", reason="oversize") == 1
    assert board("encoder_cudagraph_misses_total", device="cuda:1", reason="disabled") == 2
    assert board("encoder_cudagraph_misses_total", device="cuda:1", reason="error") == 0
    assert board("encoder_cudagraph_replays_total", device="cuda:1", budget="128") == 2
    assert board("encoder_cudagraph_replays_total", device="cuda:1", budget="64") == 0
    assert board("encoder_cudagraph_replays_total", device="cuda:0", budget="64") == 1
    assert board("encoder_padding_tokens_total") == 12
    assert board("device_busy_seconds_total", device="cuda:1") == 0.25
    assert board("device_busy_seconds_total", device="cuda:0") == 0.5
    assert (board("batch_images_sum"), board("batch_images_count")) == (6, 2)
    assert board("batch_images_bucket", le="4.0") == 1
    assert (board("batch_tokens_sum"), board("batch_tokens_bucket", le="64.0")) == (764, 1)


def test_unlisted_label_is_a_programming_error(board: Board) -> None:
    board.metrics.add_device("cpu")
    with pytest.raises(AssertionError, match="nap"):
        board.metrics.observe_stage(cast(Any, "nap"), 1)
    with pytest.raises(AssertionError, match="oops"):
        board.metrics.count_error(cast(Any, "oops"))
    with pytest.raises(AssertionError, match="bad luck"):
        board.metrics.observe_batch(stats("cpu", misses={"bad luck": 1}))
    with pytest.raises(AssertionError, match="differ"):
        board.metrics.observe_batch(stats("cpu", 2, misses={"error": 1}))
    with pytest.raises(AssertionError, match="unknown budget"):
        board.metrics.observe_batch(stats("cpu", hits=1, replays={64: 1}))
    assert board("images_total") == 0


@dataclass
class Queue:
    waiting_images: int = 3
    waiting_tokens: int = 300
    limit_tokens: int = 4000
    held_bytes: int = 50


GAUGES = ("queue_images", "queue_tokens", "queue_limit_tokens", "inflight_bytes")


def test_gauges_of_the_queue_are_read_at_each_scrape(board: Board) -> None:
    assert [board(name) for name in GAUGES] == [0, 0, 0, 0]
    queue = Queue()
    board.metrics.watch_queue(queue, queue)
    assert [board(name) for name in GAUGES] == [3, 300, 4000, 50]
    queue.waiting_images, queue.waiting_tokens, queue.limit_tokens, queue.held_bytes = 1, 2, 3, 4
    assert [board(name) for name in GAUGES] == [1, 2, 3, 4]


def test_registries_do_not_share_anything(board: Board) -> None:
    board.metrics.requests_in_flight.inc()
    assert Board()("requests_in_flight") == 0


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        (None, "text/plain"),
        ("", "text/plain"),
        ("*/*", "text/plain"),
        ("text/plain; version=0.0.4", "text/plain"),
        ("application/openmetrics-text", "application/openmetrics-text"),
        ("application/openmetrics-text; version=1.0.0,text/plain;q=0.5", "application/openmetrics-text"),
        ("application/openmetrics-text; version=x.y", "text/plain"),
        ("text/plain; version=1.x", "text/plain"),
        ("\xe9,;=", "text/plain"),
    ],
)
def test_exposition_follows_the_accept_header(board: Board, accept: str | None, media_type: str) -> None:
    body, content_type = render(board.registry, accept)
    assert content_type.startswith(media_type + ";")
    parse = parse_openmetrics if "openmetrics" in media_type else parse_text
    names = {sample.name for family in parse(body.decode()) for sample in family.samples}
    assert {P + "requests_total", P + "ready", "process_cpu_seconds_total"} <= names
    assert not [name for name in names if name.endswith("_created")]

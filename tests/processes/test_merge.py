"""The metrics of several processes as those of one server."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, Gauge, Metric, ProcessCollector
from prometheus_client.parser import text_string_to_metric_families as parse_text

from models import BatchStats
from service.metrics import MERGE_RULES, Metrics, render
from service.processes.api_server.scrape_client import GatheredMetrics
from service.processes.supervisor.merge import merge
from tests.support.traffic import Scrape

P = "vision_sidecar_"
DEVICE = "cuda:0"


class FakeProcess:
    """The metrics of one process that has a device and is ready."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry, ["/embed"])
        self.metrics.add_device(DEVICE)
        self.metrics.set_graphs(DEVICE, [64, 128], memory_bytes=1000, capture_seconds=1.5)
        self.metrics.set_device_up(DEVICE, True)
        self.metrics.ready.set(1)
        self.metrics.set_info(model="m", fingerprint="f", dtype="d", attn_backend="a", version="v")

    def run(self, hits: int, tokens: int, busy_s: float) -> None:
        self.metrics.observe_batch(BatchStats(DEVICE, hits, tokens, hits, {}, {64: 1}, 3, busy_s))

    def collect(self) -> list[Metric]:
        return list(self.registry.collect())


def scrape(*processes: FakeProcess) -> Scrape:
    merged = GatheredMetrics(merge(process.collect() for process in processes))
    return Scrape(render(merged, None)[0].decode())


@pytest.fixture
def three() -> list[FakeProcess]:
    return [FakeProcess() for _ in range(3)]


def test_counters_are_sums_by_their_labels(three: list[FakeProcess]) -> None:
    for number, process in enumerate(three):
        for _ in range(number + 1):
            process.metrics.observe_request("/embed", 200, 0.004)
        process.metrics.observe_request("/embed", 429, 0.0)
        process.metrics.count_error("queue_full")
        process.run(hits=number, tokens=10 * number, busy_s=0.5)
    found = scrape(*three)
    assert found.statuses() == {200: 6, 429: 3}
    assert found.total("errors_total", "queue_full") == found.total("errors_total") == 3
    assert found.total("images_total") == found.total("encoder_cudagraph_hits_total") == 3
    assert found.total("image_tokens_total") == 30
    assert found.total("encoder_cudagraph_replays_total", 'budget="64"') == 3
    assert found.total("encoder_cudagraph_replays_total", 'budget="128"') == 0
    assert found.total("encoder_padding_tokens_total") == 9
    assert found.total("device_busy_seconds_total") == 1.5


def test_histograms_are_sums_in_each_bucket(three: list[FakeProcess]) -> None:
    for process, duration in zip(three, (0.004, 0.004, 40.0), strict=True):
        process.metrics.observe_request("/embed", 200, duration)
    found = scrape(*three)
    buckets = {
        labels.split('le="')[1].split('"')[0]: value
        for name, labels, value in found.samples
        if name == "request_duration_seconds_bucket" and 'route="/embed"' in labels
    }
    assert [buckets[bound] for bound in ("0.0025", "0.005", "30.0", "60.0", "+Inf")] == [0, 2, 2, 3, 3]
    assert list(buckets.values()) == sorted(buckets.values())
    assert found.total("request_duration_seconds_count", "/embed") == 3
    assert math.isclose(found.total("request_duration_seconds_sum", "/embed"), 40.008)


def test_gauges_of_which_each_process_has_a_part_are_sums(three: list[FakeProcess]) -> None:
    for number, process in enumerate(three, 1):
        process.metrics.requests_in_flight.set(number)
        process.metrics._inflight_bytes.set(100 * number)
    found = scrape(*three)
    assert (found.total("requests_in_flight"), found.total("inflight_bytes")) == (6, 600)


def unready(process: FakeProcess) -> None:
    process.metrics.ready.set(0)


def lose_device(process: FakeProcess) -> None:
    process.metrics.set_device_up(DEVICE, False)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(("change", "name"), [(unready, "ready"), (lose_device, "device_up")])
def test_the_server_is_no_better_than_its_worst_process(
    three: list[FakeProcess], place: int, change: Callable[[FakeProcess], None], name: str
) -> None:
    assert scrape(*three).total(name) == 1
    change(three[place])
    assert scrape(*three).total(name) == 0


def test_gauges_that_are_the_same_in_all_processes_appear_once(three: list[FakeProcess]) -> None:
    for process in three:
        process.metrics._queue_limit_tokens.set(4096)
    found = scrape(*three)
    for name, value in (
        ("info", 1),
        ("queue_limit_tokens", 4096),
        ("encoder_cudagraph_memory_bytes", 1000),
        ("encoder_cudagraph_capture_seconds", 1.5),
    ):
        assert [(series, float(is_)) for series, _, is_ in found.samples if series == name] == [(name, value)]


def test_metric_of_only_one_process_is_unchanged(three: list[FakeProcess]) -> None:
    Gauge("vision_sidecar_extra", "Of one.", ["where"], registry=three[1].registry).labels("here").set(4)
    three[2].metrics.add_device("cuda:1")
    three[2].metrics.set_device_up("cuda:1", True)
    found = scrape(*three)
    assert found.total("extra", 'where="here"') == 4
    assert found.total("device_up", 'device="cuda:1"') == 1
    assert found.total("device_up", f'device="{DEVICE}"') == 1


def test_process_metrics_are_the_earliest_start_and_the_sums_of_use() -> None:
    def process(start: float, cpu: float, max_fds: float) -> list[Metric]:
        found = []
        for name, value in (("start_time_seconds", start), ("cpu_seconds", cpu), ("max_fds", max_fds)):
            metric = Metric(f"process_{name}", "", "counter" if name.startswith("cpu") else "gauge")
            suffix = "_total" if name.startswith("cpu") else ""
            metric.add_sample(f"process_{name}{suffix}", {}, value)
            found.append(metric)
        return found

    merged = merge([process(20.0, 1.0, 512), process(10.0, 2.0, 1024), process(30.0, 4.0, 256)])
    found = {sample.name: sample.value for metric in merged for sample in metric.samples}
    assert found == {
        "process_start_time_seconds": 10.0,
        "process_cpu_seconds_total": 7.0,
        "process_max_fds": 256,
    }


def test_merged_metrics_keep_their_form(three: list[FakeProcess]) -> None:
    """One process, merged, reads as it does without; several have the same series."""

    def forms(text: bytes) -> list[tuple[str, str, str, list[str]]]:
        return [
            (
                family.name,
                family.documentation,
                family.type,
                [str((s.name, s.labels)) for s in family.samples],
            )
            for family in parse_text(text.decode())
        ]

    alone = forms(render(three[0].registry, None)[0])
    assert forms(render(GatheredMetrics(merge([three[0].collect()])), None)[0]) == alone
    assert forms(render(GatheredMetrics(merge(process.collect() for process in three)), None)[0]) == alone
    open_metrics, content_type = render(
        GatheredMetrics(merge([three[0].collect()])), "application/openmetrics-text"
    )
    assert content_type.startswith("application/openmetrics-text")
    assert open_metrics.endswith(b"# EOF\n")


def test_merging_does_not_change_the_metrics_of_a_process(three: list[FakeProcess]) -> None:
    for process in three:
        process.metrics.observe_request("/embed", 200, 0.1)
    collected = [process.collect() for process in three]
    first, second = ([metric.samples for metric in merge(collected)] for _ in range(2))
    assert first == second


def test_every_gauge_has_a_rule() -> None:
    registry = CollectorRegistry()
    Metrics(registry, ["/embed"])
    own = {metric.name: metric.type for metric in registry.collect()}
    process = {metric.name for metric in ProcessCollector(registry=None).collect()}
    assert process <= set(own)
    gauges = {name for name, kind in own.items() if kind not in ("counter", "histogram")}
    assert gauges == set(MERGE_RULES)


def test_gauge_without_a_rule_cannot_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {name: rule for name, rule in MERGE_RULES.items() if name != f"{P}queue_images"}
    monkeypatch.setattr("service.metrics.MERGE_RULES", rules)
    with pytest.raises(AssertionError, match="no rule how to merge vision_sidecar_queue_images"):
        Metrics(CollectorRegistry(), ["/embed"])

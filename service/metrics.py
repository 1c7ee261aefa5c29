"""Every metric, on a registry that is passed in, with label sets that are closed and start at 0.

Knows what is counted and under which name; knows nothing of requests, tensors or HTTP frameworks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import Literal, Protocol, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from models import BatchStats
from service.errors import ERROR_CODES, ERROR_STATUSES, ApiError, ErrorCode

Stage = Literal["read", "fetch", "decode", "queue", "encode", "serialize", "llm"]
STAGES: tuple[Stage, ...] = get_args(Stage)
CacheKind = Literal["vector", "tokens"]
CACHE_KINDS: tuple[CacheKind, ...] = get_args(CacheKind)
MISS_REASONS = ("oversize", "disabled", "error")
CLIENT_LEFT = 499  # in place of a status if the client has left before the answer
STATUSES = (200, 204, 206, *sorted((*ERROR_STATUSES, CLIENT_LEFT)))
OTHER = "other"  # a route or status that is not in the closed list
LLM_OUTCOMES = (*map(str, STATUSES), "unreachable", "timeout", "abandoned", OTHER)

STAGE_BUCKETS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
REQUEST_BUCKETS_S = (
    *(0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2),
    *(0.5, 1, 2, 5, 10, 30, 60),
)
BATCH_IMAGES_BUCKETS = tuple(2**n for n in range(9))  # 1 to 256
BATCH_TOKENS_BUCKETS = tuple(2**n for n in range(6, 17))  # 64 to 65536


# How the values of a gauge in several processes become one. `add`: each process has a part. `max`: all have
# the same value. `min`: the worst process decides. Counters and histograms are added up without a rule.
MergeRule = Callable[[float, float], float]
MERGE_RULES: Mapping[str, MergeRule] = {
    "vision_sidecar_encoder_cudagraph_memory_bytes": max,
    "vision_sidecar_encoder_cudagraph_capture_seconds": max,
    "vision_sidecar_device_up": min,
    "vision_sidecar_queue_images": add,
    "vision_sidecar_queue_tokens": add,
    "vision_sidecar_queue_limit_tokens": max,
    "vision_sidecar_inflight_bytes": add,
    "vision_sidecar_requests_in_flight": add,
    "vision_sidecar_handoff_bytes": max,
    "vision_sidecar_handoff_entries": max,
    "vision_sidecar_handoff_leased_bytes": max,
    "vision_sidecar_ready": min,
    "vision_sidecar_info": max,
    "process_virtual_memory_bytes": add,
    "process_resident_memory_bytes": add,
    "process_open_fds": add,
    "process_start_time_seconds": min,
    "process_max_fds": min,
}


@dataclass(frozen=True)
class _DeviceSeries:
    """The series of one device."""

    hits: Counter
    misses: Mapping[str, Counter]  # by reason
    replays: dict[int, Counter]  # by budget; none without graphs
    memory_bytes: Gauge
    capture_seconds: Gauge
    busy_seconds: Counter
    up: Gauge


class Collects(Protocol):
    """A registry, or the gathered metrics of several processes."""

    def collect(self) -> Iterable[Metric]: ...


class SupportsQueueGauges(Protocol):
    """The numbers of the queue that the metrics read."""

    @property
    def waiting_images(self) -> int: ...

    @property
    def waiting_tokens(self) -> int: ...

    @property
    def limit_tokens(self) -> int: ...


class SupportsStoreGauges(Protocol):
    """The numbers of the store of tokens that the metrics read."""

    @property
    def used_bytes(self) -> int: ...

    @property
    def num_entries(self) -> int: ...

    @property
    def leased_bytes(self) -> int: ...


class SupportsByteGauge(Protocol):
    """The number of bytes in memory that the metrics read."""

    @property
    def held_bytes(self) -> int: ...


class Metrics:
    """The server's metrics. Threads may share it; every call is a dictionary look-up and an addition.

    `routes` are the templates that requests are counted under; all others are counted as `other`.
    """

    def __init__(self, registry: CollectorRegistry, routes: Sequence[str]) -> None:
        make = _Maker(registry)
        ProcessCollector(registry=registry)
        self._create_request_metrics(make, (*routes, OTHER))
        self._create_batch_metrics(make)
        self._create_device_metrics(make)
        self._create_cache_metrics(make)
        llm_requests = make.counter("llm_requests", "Requests passed on to the LLM server.", "status")
        self._llm_requests = {status: llm_requests.labels(status) for status in LLM_OUTCOMES}
        self._queue_images = make.gauge("queue_images", "Images that wait for a device.")
        self._queue_tokens = make.gauge("queue_tokens", "Image tokens that wait for a device.")
        self._queue_limit_tokens = make.gauge(
            "queue_limit_tokens", "Most image tokens that may be decoded or wait at once."
        )
        self._inflight_bytes = make.gauge(
            "inflight_bytes", "Bytes of request bodies and fetched images in memory."
        )
        self.requests_in_flight = make.gauge(
            "requests_in_flight", "Requests being answered, the scrape itself among them."
        )
        self.ready = make.gauge("ready", "1 while the server takes requests, else 0.")
        self._info = make.gauge(
            "info", "What is served; always 1.", "model", "fingerprint", "dtype", "attn_backend", "version"
        )

    def _create_request_metrics(self, make: _Maker, routes: Sequence[str]) -> None:
        requests = make.counter(
            "requests", "Requests answered; status 499: the caller left.", "route", "status"
        )
        statuses = (*map(str, STATUSES), OTHER)
        self._requests = {
            (route, status): requests.labels(route, status) for route in routes for status in statuses
        }
        durations = make.histogram(
            "request_duration_seconds", "Time to the last byte of 2xx answers.", REQUEST_BUCKETS_S, "route"
        )
        self._request_durations = {route: durations.labels(route) for route in routes}
        stages = make.histogram("stage_duration_seconds", "Wall time of a stage.", STAGE_BUCKETS_S, "stage")
        self._stages = {stage: stages.labels(stage) for stage in STAGES}
        errors = make.counter("errors", "Error answers, by the code in their body.", "code")
        self._errors = {code: errors.labels(code) for code in ERROR_CODES}

    def _create_batch_metrics(self, make: _Maker) -> None:
        self._images = make.counter("images", "Images encoded.")
        self._image_tokens = make.counter("image_tokens", "Output tokens of the images encoded.")
        self._batch_images = make.histogram(
            "batch_images", "Images in a batch, as handed to a device.", BATCH_IMAGES_BUCKETS
        )
        self._batch_tokens = make.histogram(
            "batch_tokens", "Output tokens of a batch, as handed to a device.", BATCH_TOKENS_BUCKETS
        )
        self._padding_tokens = make.counter("encoder_padding_tokens", "Tokens computed for nothing.")

    def _create_device_metrics(self, make: _Maker) -> None:
        self._hits = make.counter("encoder_cudagraph_hits", "Images run by graph replay.", "device")
        self._misses = make.counter("encoder_cudagraph_misses", "Images run eagerly.", "device", "reason")
        self._replays = make.counter(
            "encoder_cudagraph_replays", "Graph replays, by token budget.", "device", "budget"
        )
        self._graph_memory = make.gauge(
            "encoder_cudagraph_memory_bytes", "Device memory that the graphs take.", "device"
        )
        self._capture_seconds = make.gauge(
            "encoder_cudagraph_capture_seconds", "Time that capturing all graphs took.", "device"
        )
        self._busy_seconds = make.counter("device_busy_seconds", "Time that a device worked.", "device")
        self._up = make.gauge("device_up", "1 while a device takes batches, else 0.", "device")
        self._devices: dict[str, _DeviceSeries] = {}

    def _create_cache_metrics(self, make: _Maker) -> None:
        hits = make.counter("cache_hits", "Images whose result was there, or was being computed.", "kind")
        misses = make.counter("cache_misses", "Images that had to be encoded.", "kind")
        self._cache_hits = {kind: hits.labels(kind) for kind in CACHE_KINDS}
        self._cache_misses = {kind: misses.labels(kind) for kind in CACHE_KINDS}
        self._handoff_evictions = make.counter("handoff_evictions", "Entries dropped to make room.")
        self._handoff_reads = make.counter("handoff_reads", "Entries read over HTTP.")
        self._handoff_bytes = make.gauge("handoff_bytes", "Bytes in the store of tokens.")
        self._handoff_entries = make.gauge("handoff_entries", "Entries in the store of tokens.")
        self._handoff_leased_bytes = make.gauge("handoff_leased_bytes", "Bytes that may not be dropped yet.")

    def add_device(self, device: str) -> None:
        """Starts the series of a device at 0."""
        self._devices[device] = _DeviceSeries(
            hits=self._hits.labels(device),
            misses={reason: self._misses.labels(device, reason) for reason in MISS_REASONS},
            replays={},
            memory_bytes=self._graph_memory.labels(device),
            capture_seconds=self._capture_seconds.labels(device),
            busy_seconds=self._busy_seconds.labels(device),
            up=self._up.labels(device),
        )

    def set_graphs(
        self, device: str, budgets: Sequence[int], *, memory_bytes: int, capture_seconds: float
    ) -> None:
        """Sets the facts of the graphs of a device, and starts the series of its budgets at 0."""
        series = self._devices[device]
        series.replays.update((budget, self._replays.labels(device, str(budget))) for budget in budgets)
        series.memory_bytes.set(memory_bytes)
        series.capture_seconds.set(capture_seconds)

    def set_device_up(self, device: str, up: bool) -> None:
        """Sets whether a device takes batches."""
        self._devices[device].up.set(up)

    def set_info(self, *, model: str, fingerprint: str, dtype: str, attn_backend: str, version: str) -> None:
        """Sets the labels of `info`, once the model is loaded."""
        self._info.labels(model, fingerprint, dtype, attn_backend, version).set(1)

    def watch_queue(self, queue: SupportsQueueGauges, budget: SupportsByteGauge) -> None:
        """Reads the gauges of the queue at each scrape."""
        self._queue_images.set_function(lambda: queue.waiting_images)
        self._queue_tokens.set_function(lambda: queue.waiting_tokens)
        self._queue_limit_tokens.set_function(lambda: queue.limit_tokens)
        self._inflight_bytes.set_function(lambda: budget.held_bytes)

    def watch_store(self, store: SupportsStoreGauges) -> None:
        """Reads the gauges of the store of tokens at each scrape."""
        self._handoff_bytes.set_function(lambda: store.used_bytes)
        self._handoff_entries.set_function(lambda: store.num_entries)
        self._handoff_leased_bytes.set_function(lambda: store.leased_bytes)

    @property
    def routes(self) -> Collection[str]:
        """The routes that requests are counted under."""
        return self._request_durations.keys()

    def observe_request(self, route: str, status: int, duration_s: float) -> None:
        """Counts an answered request; its duration to the last byte counts where the status is 2xx."""
        if route not in self._request_durations:
            route = OTHER
        self._requests[route, str(status) if status in STATUSES else OTHER].inc()
        if 200 <= status < 300:
            self._request_durations[route].observe(duration_s)

    def observe_stage(self, stage: Stage, duration_s: float) -> None:
        """Records the wall time of one stage of a request."""
        assert stage in self._stages, f"unknown stage {stage!r}"
        self._stages[stage].observe(duration_s)

    def observe_cache(self, kind: CacheKind, *, hits: int, misses: int) -> None:
        """Counts the images of a request: `hits` were there or shared, `misses` were encoded for it."""
        self._cache_hits[kind].inc(hits)
        self._cache_misses[kind].inc(misses)

    def count_evictions(self, number: int) -> None:
        """Counts entries of the store that were dropped to make room."""
        self._handoff_evictions.inc(number)

    def count_llm_request(self, status: str) -> None:
        """Counts a request to the LLM server by the status of its answer, or by how it failed."""
        self._llm_requests[status if status in self._llm_requests else OTHER].inc()

    def count_read(self) -> None:
        """Counts an entry of the store that was read over HTTP."""
        self._handoff_reads.inc()

    def count_error(self, code: ErrorCode) -> None:
        """Counts an error answer."""
        assert code in self._errors, f"unknown error code {code!r}"
        self._errors[code].inc()

    def count_refusal(self, error: ApiError) -> None:
        """Counts a request that was refused before it had a route."""
        self.observe_request(OTHER, error.status, 0.0)
        self.count_error(error.code)

    def observe_batch(self, stats: BatchStats) -> None:
        """Records a batch that a device has finished."""
        assert stats.num_images == stats.hits + sum(stats.misses.values()), f"hits and misses differ: {stats}"
        assert set(stats.misses) <= set(MISS_REASONS), f"unknown reason for a miss: {stats}"
        series = self._devices[stats.device]
        assert set(stats.replays) <= set(series.replays), f"unknown budget: {stats}"
        self._images.inc(stats.num_images)
        self._image_tokens.inc(stats.num_tokens)
        self._batch_images.observe(stats.num_images)
        self._batch_tokens.observe(stats.num_tokens)
        series.hits.inc(stats.hits)
        for reason, count in stats.misses.items():
            series.misses[reason].inc(count)
        for budget, count in stats.replays.items():
            series.replays[budget].inc(count)
        self._padding_tokens.inc(stats.padding_tokens)
        series.busy_seconds.inc(stats.busy_s)


class _Maker:
    """Creates metrics with our prefix on one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"vision_sidecar_{name}", text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        name = f"vision_sidecar_{name}"
        assert name in MERGE_RULES, f"no rule how to merge {name}"
        return Gauge(name, text, labels, registry=self._registry)

    def histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"vision_sidecar_{name}", text, labels, buckets=buckets, registry=self._registry)


class _WithoutCreated(Collector):
    """Metrics without their `_created` series. The library's own switch is global to the process."""

    def __init__(self, source: Collects) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        for metric in self._source.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


def render(source: Collects, accept: str | None) -> tuple[bytes, str]:
    """The exposition and its content type: OpenMetrics where `accept` asks for it, else Prometheus text."""
    collector = _WithoutCreated(source)
    try:
        encode, content_type = choose_encoder(accept or "")
        return encode(collector), content_type
    except TypeError:  # the library compares an unusual version in `accept`, such as `1.x`, with numbers
        encode, content_type = choose_encoder("")
        return encode(collector), content_type

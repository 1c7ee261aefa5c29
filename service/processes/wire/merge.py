"""The metrics of several processes as those of one server.

Knows our own metrics and `process_*`; nothing of how they came here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import add

from prometheus_client import Metric
from prometheus_client.samples import Sample

_Rule = Callable[[float, float], float]

# What is no sum: every process has the same, or the process in question decides.
_RULES: dict[str, _Rule] = {
    "vision_sidecar_ready": min,
    "vision_sidecar_device_up": min,
    "vision_sidecar_info": max,
    "vision_sidecar_queue_limit_tokens": max,
    "vision_sidecar_encoder_cudagraph_memory_bytes": max,
    "vision_sidecar_encoder_cudagraph_capture_seconds": max,
    "process_start_time_seconds": min,
    "process_max_fds": min,
}


@dataclass(frozen=True)
class Merged:
    """Metrics that were gathered, where a registry is expected."""

    metrics: Sequence[Metric]

    def collect(self) -> Iterable[Metric]:
        """The metrics."""
        return self.metrics


def merge(processes: Iterable[Iterable[Metric]]) -> list[Metric]:
    """One of each metric, in the order in which they first appear: sums, but for what is no sum."""
    merged: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for metrics in processes:
        for metric in metrics:
            merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            rule: _Rule = _RULES.get(metric.name, add)
            own = values.setdefault(metric.name, {})
            for sample in metric.samples:
                key = sample.name, tuple(sample.labels.items())
                own[key] = rule(own[key], sample.value) if key in own else sample.value
    for name, metric in merged.items():
        metric.samples = [
            Sample(series, dict(labels), value) for (series, labels), value in values[name].items()
        ]
    return list(merged.values())

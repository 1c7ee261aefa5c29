"""Merges the metrics of several processes into those of one server.

Knows the rules of our own metrics; knows nothing of how the metrics came here.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import add

from prometheus_client import Metric
from prometheus_client.samples import Sample

from service.metrics import MERGE_RULES, MergeRule


def merge(processes: Iterable[Iterable[Metric]]) -> list[Metric]:
    """Returns one metric of each name, in the order of their first appearance.

    Counters and histograms are added up. A gauge is merged by its rule in `MERGE_RULES`.
    """
    merged: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for metrics in processes:
        for metric in metrics:
            merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            rule: MergeRule = MERGE_RULES.get(metric.name, add)
            own = values.setdefault(metric.name, {})
            for sample in metric.samples:
                key = sample.name, tuple(sample.labels.items())
                own[key] = rule(own[key], sample.value) if key in own else sample.value
    for name, metric in merged.items():
        metric.samples = [
            Sample(series, dict(labels), value) for (series, labels), value in values[name].items()
        ]
    return list(merged.values())

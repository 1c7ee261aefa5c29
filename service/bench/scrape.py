"""The metrics of the measured server, and their growth during the measured time.

Knows the names of metrics. Knows nothing of load. Metrics that the server does not export are left out.
"""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_TIMEOUT_S = 5.0
_PREFIX = "vision_sidecar_"
_MEMORY = re.compile(r"^process_resident_memory_bytes (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Snapshot:
    """The metrics at one time, by name without the prefix `vision_sidecar_`."""

    at_s: float  # `time.monotonic`
    samples: Mapping[str, Sequence[Sample]]

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The values of a metric, by the value of a label."""
        return {sample.labels.get(label, ""): sample.value for sample in self.samples.get(name, ())}

    def total(self, name: str) -> float | None:
        """The sum over all series of a metric. None if it has none."""
        samples = self.samples.get(name)
        return None if samples is None else sum(sample.value for sample in samples)


@dataclass(frozen=True)
class Growth:
    """The growth of metrics between two snapshots. None for a metric that the server does not export."""

    device_busy: dict[str, float]  # busy seconds per second, by device
    graph_hits: float | None  # images
    graph_misses: float | None
    padded_share: float | None  # of the computed tokens
    batch_images: float | None  # mean
    stage_ms: dict[str, float]  # means


class Server:
    """The metrics page of a server. `prefix` is the path in front of the server's own paths."""

    def __init__(self, host: str, port: int, prefix: str) -> None:
        self._host, self._port = host, port
        self._path = f"{prefix}/metrics"

    def snapshot(self) -> Snapshot:
        """The metrics now. Empty if the server has no such page. Raises `OSError` if it does not answer."""
        text = self._get()
        try:
            families = [*text_string_to_metric_families(text)]
        except ValueError:
            families = []
        samples: dict[str, list[Sample]] = {}
        for family in families:
            for sample in family.samples:
                samples.setdefault(sample.name.removeprefix(_PREFIX), []).append(sample)
        return Snapshot(time.monotonic(), samples)

    def memory_bytes(self) -> list[float]:
        """Resident memory of the process now. Empty if it cannot be read."""
        try:
            return [float(value) for value in _MEMORY.findall(self._get())]
        except OSError:
            return []

    def _get(self) -> str:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", self._path)
            answer = connection.getresponse()
            body = answer.read()
        except http.client.HTTPException as error:
            raise OSError(f"not HTTP: {type(error).__name__}") from None
        finally:
            connection.close()
        return body.decode(errors="replace") if answer.status == 200 else ""


def growth(before: Snapshot, after: Snapshot) -> Growth:
    """The growth of the metrics between two snapshots."""
    seconds = after.at_s - before.at_s
    tokens, padding = (_grown(before, after, f"{name}_tokens_total") for name in ("image", "encoder_padding"))
    return Growth(
        device_busy={
            device: busy / seconds
            for device, busy in _grown_by(before, after, "device_busy_seconds_total", "device").items()
        },
        graph_hits=_grown(before, after, "encoder_cudagraph_hits_total"),
        graph_misses=_grown(before, after, "encoder_cudagraph_misses_total"),
        padded_share=_ratio(padding, None if tokens is None or padding is None else tokens + padding),
        batch_images=_ratio(
            _grown(before, after, "batch_images_sum"), _grown(before, after, "batch_images_count")
        ),
        stage_ms=_stage_means_ms(before, after),
    )


def _stage_means_ms(before: Snapshot, after: Snapshot) -> dict[str, float]:
    seconds = _grown_by(before, after, "stage_duration_seconds_sum", "stage")
    counts = _grown_by(before, after, "stage_duration_seconds_count", "stage")
    return {
        stage: total / count * 1e3 for stage, total in seconds.items() if (count := counts.get(stage, 0)) > 0
    }


def _grown(before: Snapshot, after: Snapshot, name: str) -> float | None:
    total = after.total(name)
    return None if total is None else total - (before.total(name) or 0)


def _grown_by(before: Snapshot, after: Snapshot, name: str, label: str) -> dict[str, float]:
    start = before.by_label(name, label)
    return {key: value - start.get(key, 0) for key, value in after.by_label(name, label).items()}


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None

"""Rates, latencies and errors from the notes of all load processes, and the table that shows them.

Knows times and outcomes. Knows nothing of how requests were sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from service.bench.load import Notes
from service.bench.scrape import Growth

REFUSALS = (429, 503)
LATE_MS = 10.0  # a request that was sent more than this after it was due counts as late
MAX_REFUSED = 20  # images that the table names

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Times:
    """Milliseconds, over several requests. None if there were no requests."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


@dataclass(frozen=True)
class LoadReport:
    """Figures of the measured time.

    Rates count the answers that arrived in the measured time. All other figures are of the requests that were
    due in it, even if they were answered later. `latency_ms` counts from when a request was due,
    `service_time_ms` from when it was sent.
    """

    window_s: float
    requests: int
    answered_per_s: float
    ok_per_s: float
    images_per_s: float
    latency_ms: Times  # of 2xx
    service_time_ms: Times  # of 2xx
    refusal_ms: Times  # of 429 and 503, from when they were due
    statuses: dict[str, int]
    error_codes: dict[str, int]
    connection_errors: dict[str, int]
    unfinished: int  # without an answer when the load was stopped
    tokens_gb_per_s: float  # gigabytes of tokens read from the server's store in a second
    tokens_missing: int  # images whose tokens were not there, in all of the load
    lag_ms: Times  # from when a request was due until it was sent
    late: int  # sent more than 10 ms after the request was due


@dataclass(frozen=True)
class Memory:
    """Resident bytes of the server. None if its metrics do not have them."""

    start: float | None
    end: float | None
    max: float | None


def summarize(notes: Sequence[Notes], start_s: float, end_s: float, images_per_request: int) -> LoadReport:
    """The figures of the time from `start_s` to `end_s`, in seconds since the common start."""
    due, sent, done = (_joined([getattr(each, name) for each in notes]) for name in ("due", "sent", "done"))
    outcomes = [_outcomes(each) for each in notes]
    labels = [label for each in outcomes for label in each]
    status = np.array([status for status, _ in labels], dtype=np.int64)
    in_window = (due >= start_s) & (due < end_s)
    came = (done >= start_s) & (done < end_s)
    is_ok = (status >= 200) & (status < 300)
    window_s = max(end_s - start_s, 0.0)
    per_s = 1 / window_s if window_s else 0.0
    ok, refused = in_window & is_ok, in_window & np.isin(status, REFUSALS)
    lag = (sent - due)[in_window]
    counted = [label for label, is_in in zip(labels, in_window, strict=True) if is_in]
    return LoadReport(
        window_s=window_s,
        requests=int(in_window.sum()),
        answered_per_s=float((came & (status > 0)).sum() * per_s),
        ok_per_s=float((came & is_ok).sum() * per_s),
        images_per_s=float((came & is_ok).sum() * per_s * images_per_request),
        latency_ms=_times((done - due)[ok]),
        service_time_ms=_times((done - sent)[ok]),
        refusal_ms=_times((done - due)[refused]),
        statuses=_counts([str(status) for status, _ in counted if status]),
        error_codes=_counts([code for status, code in counted if status and code]),
        connection_errors=_counts([code for status, code in counted if not status]),
        unfinished=sum(each.unfinished for each in notes),
        tokens_gb_per_s=float(_joined([each.num_bytes for each in notes])[came & is_ok].sum() * per_s / 1e9),
        tokens_missing=sum(each.missing for each in notes),
        lag_ms=_times(lag),
        late=int((lag * 1e3 > LATE_MS).sum()),
    )


def _joined(arrays: Sequence[Sequence[float]]) -> Floats:
    return np.concatenate([np.empty(0), *(np.asarray(array, dtype=np.float64) for array in arrays)])


def _outcomes(notes: Notes) -> Iterator[tuple[int, str]]:
    names = list(notes.outcomes)
    return (names[index] for index in notes.outcome)


def _times(seconds: Floats) -> Times:
    if not len(seconds):
        return Times(None, None, None, None, None)
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99)) * 1e3
    return Times(float(seconds.mean() * 1e3), float(p50), float(p90), float(p99), float(seconds.max() * 1e3))


def _counts(names: Sequence[str]) -> dict[str, int]:
    return {name: names.count(name) for name in sorted(set(names))}


def format_report(
    load: LoadReport,
    is_open: bool,
    server: Growth | None,
    memory: Memory,
    refused: Mapping[str, str] = {},
) -> str:
    """The table. `refused` has the error code of each refused image, by name."""
    lines = [
        _line("requests", f"{load.requests} in {load.window_s:.1f} s, and {load.unfinished} unfinished"),
        _line("answered", f"{load.answered_per_s:.1f}/s"),
        _line("2xx", f"{load.ok_per_s:.1f}/s; {load.images_per_s:.1f} images/s"),
        _line("milliseconds", "".join(f"{name:>10}" for name in ("mean", "P50", "P90", "P99", "max"))),
        _times_line("latency of 2xx", load.latency_ms),
    ]
    if is_open:
        lines += [
            _times_line("  since sent", load.service_time_ms),
            _times_line("sent late by", load.lag_ms),
        ]
    lines += [
        _times_line("429 and 503", load.refusal_ms),
        _line("statuses", _pairs(load.statuses)),
        _line("error codes", _pairs(load.error_codes)),
        _line("no answer", _pairs(load.connection_errors)),
    ]
    if load.tokens_gb_per_s or load.tokens_missing:
        lines.append(_line("tokens read", f"{load.tokens_gb_per_s:.2f} GB/s; {load.tokens_missing} missing"))
    if load.late and is_open:
        lines.append(
            f"{load.late} requests were sent over {LATE_MS:.0f} ms late: the generator was too slow\n"
        )
    return "".join([*lines, *_server_lines(server, memory), *_refused_lines(refused)])


def _refused_lines(refused: Mapping[str, str]) -> Iterator[str]:
    for name, code in islice(refused.items(), MAX_REFUSED):
        yield _line("refused image", f"{name}: {code}")
    if len(refused) > MAX_REFUSED:
        yield _line("refused images", f"{len(refused) - MAX_REFUSED} more, which --json lists")


def _server_lines(server: Growth | None, memory: Memory) -> Iterator[str]:
    if server is not None:
        busy = {name: f"{share:.3f} s/s" for name, share in server.device_busy.items()}
        hits, misses = _number(server.graph_hits), _number(server.graph_misses)
        padded = "-" if server.padded_share is None else f"{server.padded_share:.1%}"
        yield _line("devices busy", _pairs(busy))
        yield _line("graphs", f"{hits} hits, {misses} misses, {padded} of tokens padded")
        yield _line("images a batch", "-" if server.batch_images is None else f"{server.batch_images:.1f}")
        yield _line("stages, mean", _pairs({name: f"{ms:.2f} ms" for name, ms in server.stage_ms.items()}))
    start, end, top = (_number(value and value / 2**20) for value in (memory.start, memory.end, memory.max))
    yield _line("server's memory", f"{start} MiB at start, {end} at end, {top} at most")


def _line(name: str, text: str) -> str:
    return f"{name:<16}{text}\n"


def _times_line(name: str, times: Times) -> str:
    values = (times.mean, times.p50, times.p90, times.p99, times.max)
    return _line(name, "".join(f"{'-' if value is None else format(value, '.2f'):>10}" for value in values))


def _pairs(values: dict[str, int] | dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"

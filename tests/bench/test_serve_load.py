"""The load of `bench serve`: connections, schedules, counted requests."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from service.bench.http_client import Answer, Client, SendError
from service.bench.load import Notes, arrivals
from service.bench.load_report import Memory, format_report, summarize
from tests.support.bench_load import REQUEST, load, measure, share
from tests.support.fake_server import CLOSED, OK, FakeServer, Reply, refusal, reply


def ask(server: FakeServer, count: int = 1, timeout_s: float = 5.0) -> list[Answer | str]:
    """Sends requests one after the other. Returns each answer, or the message of its `SendError`."""

    async def run() -> list[Answer | str]:
        client = Client("127.0.0.1", server.port, timeout_s)
        answers: list[Answer | str] = []
        for _ in range(count):
            try:
                answers.append(await client.send([REQUEST]))
            except SendError as error:
                answers.append(str(error))
        client.close()
        return answers

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (OK, Answer(200, "")),
        (refusal("overloaded"), Answer(429, "overloaded")),
        (reply(503, b"<html>"), Answer(503, "none")),
        (reply(503, b'{"error": "x"}'), Answer(503, "none")),
        (reply(500, b"[]"), Answer(500, "none")),
        (reply(204, b""), Answer(204, "")),
        (reply(200, b"{}", "connection: close"), Answer(200, "")),
        (
            Reply(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"),
            Answer(200, ""),
        ),
        (Reply(b"HTTP/1.1 100 Continue\r\n\r\n" + OK.data), Answer(200, "")),
        (Reply(b"HTTP/1.0 200 OK\r\n\r\nuntil the end", closes=True), Answer(200, "")),
        (Reply(b'HTTP/1.0 429 x\r\n\r\n{"error": {"code": "full"}}', closes=True), Answer(429, "full")),
        (CLOSED, "closed"),
        (Reply(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab", closes=True), "closed"),
        (Reply(b"HTTP/1.1 200 OK\r\ncontent-le", closes=True), "closed"),
        (Reply(b"SSH-2.0-OpenSSH\r\n"), "invalid_http"),
        (Reply(b"HTTP/1.1 200 OK\r\n"), "timeout"),
    ],
)
def test_answer_is_read_with_every_framing(data: Reply, expected: Answer | str) -> None:
    with FakeServer(lambda n: data if n == 0 else OK) as server:
        timeout_s = 0.2 if expected == "timeout" else 5.0
        assert ask(server, 2, timeout_s) == [expected, Answer(200, "")]


def test_connections_are_kept_until_the_server_closes_them() -> None:
    with FakeServer(lambda n: reply(200, b"{}", "connection: close") if n == 2 else OK) as server:
        assert ask(server, 5) == [Answer(200, "")] * 5
        assert server.seen.connections == 2


def test_refused_connection_is_an_error() -> None:
    with FakeServer() as server:
        pass
    assert ask(server) == ["connect"]


def test_every_answer_of_all_processes_is_counted_once(tmp_path: Path) -> None:
    with FakeServer(lambda n: refusal("overloaded") if n % 3 == 2 else OK) as server:
        flags = ["--concurrency", "4", "--processes", "2", "--duration", "0.5"]
        report = measure(server, *flags, tmp_path=tmp_path)
        count = len(server.seen.posts)
    assert report["processes"] == 2
    assert report["load"]["statuses"] == {"200": count - count // 3, "429": count // 3}
    assert report["load"]["error_codes"] == {"overloaded": count // 3}
    assert report["load"]["connection_errors"] == {}
    assert report["load"]["requests"] == count
    assert report["load"]["refusal_ms"]["p99"] > 0
    assert report["load"]["ok_per_s"] == pytest.approx(report["load"]["answered_per_s"] * 2 / 3, rel=0.05)


def test_open_loop_sends_exactly_the_requests_that_are_due(tmp_path: Path) -> None:
    flags = ["--rate", "200", "--processes", "2", "--duration", "0.5", "--seed", "7"]
    with FakeServer() as server:
        report = measure(server, *flags, tmp_path=tmp_path)
        count = len(server.seen.posts)
    due = sum(len(list(arrivals(100, 0.5, f"7/{index}"))) for index in range(2))
    assert report["load"]["requests"] == report["load"]["statuses"]["200"] == count == due


def test_open_loop_notes_when_requests_were_due() -> None:
    with FakeServer(stall_at=0, stall_s=0.2) as server:
        notes = load(share(server.port, rate=100, seed="7"))
    assert sorted(notes.due) == list(arrivals(100, 0.5, "7"))
    assert all(due <= sent < done for due, sent, done in zip(notes.due, notes.sent, notes.done, strict=True))


def test_lost_connections_are_errors_and_do_not_stop_the_load() -> None:
    with FakeServer(lambda n: CLOSED if n % 4 == 3 else OK) as server:
        notes = load(share(server.port, concurrency=2))
        count = len(server.seen.posts)
    report = summarize([notes], 0, 1, 1)
    assert report.connection_errors == {"closed": count // 4}
    assert report.statuses == {"200": count - count // 4}
    assert server.seen.connections >= count // 4


def test_stall_counts_for_all_requests_that_were_due_in_it() -> None:
    with FakeServer(stall_at=20, stall_s=0.5) as server:
        notes = load(share(server.port, rate=100, total_s=1.0))
    open_loop = summarize([notes], 0, 1, 1)
    with FakeServer(stall_at=20, stall_s=0.5) as server:
        closed_loop = summarize([load(share(server.port, total_s=1.0))], 0, 1, 1)
    assert (open_loop.latency_ms.p90 or 0) > 300
    assert (open_loop.latency_ms.max or 0) > 450
    assert (closed_loop.latency_ms.p90 or 0) < 100
    assert (closed_loop.latency_ms.max or 0) > 450


def test_lateness_of_the_generator_counts_as_latency() -> None:
    notes = Notes()
    for _ in range(100):
        notes.add(due=1.0, sent=1.4, done=1.5, status=200, code="")
    report = summarize([notes], 0, 2, 1)
    assert report.latency_ms.p50 == pytest.approx(500)
    assert report.service_time_ms.p50 == pytest.approx(100)
    assert report.lag_ms.p99 == pytest.approx(400)
    assert report.late == 100
    assert "100 requests were sent over 10 ms late" in format_report(
        report, True, None, Memory(None, None, None)
    )


def test_only_requests_of_the_measured_time_count() -> None:
    first, second = Notes(unfinished=1), Notes(unfinished=2)
    first.add(0.5, 0.5, 0.6, 200, "")  # warm-up
    first.add(0.9, 0.9, 1.5, 200, "")  # due in the warm-up, answered in the measured time
    first.add(1.0, 1.0, 1.1, 200, "")
    second.add(2.0, 2.0, 2.3, 503, "draining")
    second.add(2.5, 2.5, 2.6, 0, "timeout")
    second.add(2.9, 2.9, 4.0, 200, "")  # due in the measured time, answered after it
    second.add(2.9, 2.9, 4.0, 200, "")
    report = summarize([first, second], 1, 3, 4)
    assert report.requests == 5
    assert (report.answered_per_s, report.ok_per_s, report.images_per_s) == (1.5, 1.0, 4.0)
    assert report.statuses == {"200": 3, "503": 1}
    assert report.error_codes == {"draining": 1}
    assert report.connection_errors == {"timeout": 1}
    assert report.latency_ms.max == pytest.approx(1100)
    assert report.refusal_ms.p50 == pytest.approx(300)
    assert report.unfinished == 3


def test_arrivals_are_a_poisson_process() -> None:
    times = list(arrivals(1000, 20, "seed"))
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1e-3, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.05)
    assert times == list(arrivals(1000, 20, "seed"))
    assert times != list(arrivals(1000, 20, "other"))

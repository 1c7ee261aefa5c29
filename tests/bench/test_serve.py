from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from service.bench import command as bench
from service.bench.fleet import Fleet, FleetError
from service.bench.http_client import Answer, Client, SendError
from service.bench.load import Notes, Share, arrivals, send_all
from service.bench.load_report import Memory, format_report, summarize
from service.bench.photos import name_refused
from service.bench.scrape import Server, growth
from tests.support.app import encode_image
from tests.support.fake_server import CLOSED, OK, FakeServer, Reply, refusal, reply
from tests.support.process import Process
from tests.support.project import ROOT

REQUEST = memoryview(b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc")


def ask(server: FakeServer, count: int = 1, timeout_s: float = 5.0) -> list[Answer | str]:
    """Sends requests one after the other. Returns each answer, or the message of its `SendError`."""

    async def run() -> list[Answer | str]:
        client = Client("127.0.0.1", server.port, timeout_s)
        answers: list[Answer | str] = []
        for _ in range(count):
            try:
                answers.append(await client.send(REQUEST))
            except SendError as error:
                answers.append(str(error))
        client.close()
        return answers

    return asyncio.run(run())


def measure(server: FakeServer, *flags: str, tmp_path: Path) -> dict[str, Any]:
    """Runs `bench serve` against a server and returns its JSON report."""
    path = tmp_path / "report.json"
    command = ["serve", "--url", server.url, "--warmup", "0", "--json", str(path), "--size", "64x32"]
    assert bench.main([*command, *flags]) == 0
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def share(port: int, requests: Path = Path(), **changes: Any) -> Share:
    values: dict[str, Any] = {"rate": None, "concurrency": 1, "total_s": 0.5, "timeout_s": 5.0, "seed": "0"}
    return Share("127.0.0.1", port, requests, ((0, 1),), first=0, **(values | changes))


def load(share: Share) -> Notes:
    """Sends a share from the process of the test."""
    read_end, write_end = os.pipe()
    try:
        return asyncio.run(send_all(share, [REQUEST], time.monotonic(), read_end))
    finally:
        os.close(read_end)
        os.close(write_end)


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


def test_made_images_differ_and_are_sent_unchanged(tmp_path: Path) -> None:
    flags = ["--duration", "0.4", "--query", "pooling=mean", "--api-key", "secret"]
    with FakeServer() as server:
        report = measure(server, *flags, tmp_path=tmp_path)
    images = {body for _, body in server.seen.posts}
    assert len(images) == 32
    for data in images:
        image = Image.open(io.BytesIO(data))
        assert (image.format, image.size) == ("JPEG", (64, 32))
    head = server.seen.posts[0][0]
    assert head.startswith("POST /embed?pooling=mean HTTP/1.1\r\n")
    assert "\r\nauthorization: Bearer secret\r\n" in head
    assert f"\r\nhost: 127.0.0.1:{server.port}\r\n" in head
    assert "secret" not in json.dumps(report)


def test_images_of_a_folder_are_sent(tmp_path: Path) -> None:
    files = [encode_image(8, 8 + index) for index in range(3)]
    for index, data in enumerate(files):
        (tmp_path / f"{index}.PNG").write_bytes(data)
    (tmp_path / "notes.txt").write_text("no image")
    with FakeServer() as server:
        path = tmp_path / "report.json"
        flags = f"--url {server.url} --warmup 0 --duration 1 --json {path} --images {tmp_path}"
        assert bench.main(["serve", *flags.split()]) == 0
    assert {body for _, body in server.seen.posts} == set(files)


@pytest.mark.parametrize(
    ("param", "images_per_request", "are_named"),
    [
        (b'"images[0]"', 1, True),
        (b"null", 1, True),
        (b'"images[1]"', 2, True),
        (b"null", 2, False),
        (b'"pooling"', 1, False),
    ],
)
def test_refused_images_are_named_if_the_error_is_about_an_image(
    param: bytes, images_per_request: int, are_named: bool, tmp_path: Path
) -> None:
    names = ["0.PNG", "1.PNG", "2.PNG"] if are_named else []
    for index in range(3):
        (tmp_path / f"{index}.PNG").write_bytes(encode_image(8, 8 + index))
    error = reply(415, b'{"error": {"code": "unsupported_image_type", "param": %s}}' % param)
    path = tmp_path / "report.json"
    with FakeServer(lambda n: error) as server:
        flags = f"--url {server.url} --warmup 0 --duration 0.2 --json {path} --images {tmp_path}"
        flags += f" --images-per-request {images_per_request}"
        assert bench.main(["serve", *flags.split()]) == 0
    assert json.loads(path.read_text())["refused_images"] == dict.fromkeys(names, "unsupported_image_type")


def test_refused_image_is_found_by_its_place_in_the_request() -> None:
    errors = {(0, "images[1]"): "invalid_image", (2, "images[2]"): "unsupported_image_type"}
    named = {"b": "unsupported_image_type"}  # the last error of an image
    assert name_refused(["a", "b", "c"], 3, errors) == named
    assert name_refused(["a", "b", "c", "d"], 3, errors) == {
        "a": "unsupported_image_type",
        "b": "invalid_image",
    }


def test_table_names_a_few_refused_images() -> None:
    refused = {f"{number:02}.heic": "unsupported_image_type" for number in range(22)}
    report = summarize([], 0, 1, 1)
    table = format_report(report, False, None, Memory(None, None, None), refused)
    lines = [line for line in table.splitlines() if line.startswith("refused")]
    assert len(lines) == 21
    assert lines[0] == "refused image   00.heic: unsupported_image_type"
    assert lines[-1] == "refused images  2 more, which --json lists"


def test_growth_of_counters_is_reported() -> None:
    def snapshot(text: str) -> Any:
        with FakeServer() as server:
            server.metrics = text
            return Server("127.0.0.1", server.port, "").snapshot()

    name = "vision_sidecar_"
    before = snapshot(f'{name}device_busy_seconds_total{{device="a"}} 1\n')
    after = snapshot(
        f'{name}device_busy_seconds_total{{device="a"}} 3\n'
        f'{name}encoder_cudagraph_hits_total{{device="a"}} 5\n'
        f'{name}encoder_cudagraph_hits_total{{device="b"}} 2\n'
        f"{name}image_tokens_total 75\n{name}encoder_padding_tokens_total 25\n"
        f'{name}stage_duration_seconds_sum{{stage="queue"}} 0.5\n'
        f'{name}stage_duration_seconds_count{{stage="queue"}} 10\n'
        f'{name}stage_duration_seconds_sum{{stage="fetch"}} 0\n'
        f'{name}stage_duration_seconds_count{{stage="fetch"}} 0\n'
        f"{name}batch_images_sum 12\n{name}batch_images_count 4\n"
    )
    grown = growth(before, after)
    assert grown.device_busy["a"] == pytest.approx(2 / (after.at_s - before.at_s))
    assert grown.graph_hits == 7
    assert grown.graph_misses is None
    assert grown.padded_share == 0.25
    assert grown.batch_images == 3
    assert grown.stage_ms == {"queue": pytest.approx(50)}


def test_metrics_of_the_server_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        report = measure(server, "--rate", "100", "--duration", "1.2", tmp_path=tmp_path)
    assert report["server"]["device_busy"] == {"fake": pytest.approx(100, rel=0.5)}
    memory = report["memory"]
    assert 10000 <= memory["start"] < memory["end"] == memory["max"]
    table = capsys.readouterr().out
    assert re.search(r"^devices busy +fake \d+\.\d{3} s/s$", table, re.MULTILINE)
    assert "graphs          - hits, - misses, - of tokens padded\n" in table


def test_server_without_metrics_is_measured(tmp_path: Path) -> None:
    with FakeServer() as server:
        server.metrics = "{}<no metrics>"
        report = measure(server, "--duration", "0.2", tmp_path=tmp_path)
    assert report["load"]["statuses"]["200"] > 0
    assert report["server"]["device_busy"] == {}
    assert report["memory"] == {"start": None, "end": None, "max": None}


def test_ctrl_c_reports_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with FakeServer(lambda n: OK if n < 5 else Reply(b"HTTP/1.1 200 OK\r\n")) as server:
        flags = f"--url {server.url} --rate 50 --processes 2 --warmup 0 --duration 60 --json {path}"
        process = subprocess.Popen(
            [sys.executable, "-m", "service", "bench", "serve", *flags.split()],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        deadline = time.monotonic() + 20
        while len(server.seen.posts) < 10:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)  # to all processes, like a terminal
        output, error = process.communicate(timeout=20)
    assert process.returncode == 130
    assert error == ""
    assert re.search(r"^statuses +200 5$", output, re.MULTILINE)
    report = json.loads(path.read_text())["load"]
    assert report["statuses"] == {"200": 5}
    assert report["unfinished"] >= 5
    assert report["window_s"] < 30


def test_failed_load_process_is_an_error() -> None:
    with pytest.raises(FleetError), Fleet([share(1, Path("/no/such/file"))]) as fleet:
        fleet.start()


def test_load_process_imports_no_heavy_package() -> None:
    heavy = "import sys, service.bench.load; print({'torch', 'numpy', 'PIL'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", heavy], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    "flags",
    [
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--concurrency", "0"],
        ["--rate", "1", "--concurrency", "1"],
        ["--duration", "inf"],
        ["--warmup", "-1"],
        ["--size", "336"],
        ["--size", "9999x1"],
        ["--format", "gif"],
        ["--query", "a=b c"],
        ["--api-key", "a\r\nb"],
        ["--url", "https://127.0.0.1"],
        ["--url", "http://127.0.0.1:x"],
        ["--url", "127.0.0.1:8080"],
        ["--unknown"],
    ],
)
def test_bad_argument_is_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(["serve", *flags])
    assert caught.value.code == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert re.fullmatch(r"vision-sidecar bench: .+\n", error)
    assert flags[0] in error


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--images", "/no/such/folder"], "/no/such/folder"),
        (["--images", "{empty}"], "no image in"),
        (["--images", "{empty}", "--size", "8x8"], "--size"),
        (["--json", "/no/such/folder/file"], "/no/such/folder/file"),
    ],
)
def test_unusable_flag_is_one_line(
    flags: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer() as server:
        given = [flag.format(empty=tmp_path) for flag in flags]
        assert bench.main(["serve", "--url", server.url, *given]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.count("\n") == 1
    assert text in error


@pytest.mark.parametrize("host", ["127.0.0.1:1", "no-such-host.invalid"])
def test_server_that_does_not_answer_is_one_line(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["serve", "--url", f"http://{host}"]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert re.fullmatch(rf"vision-sidecar bench: http://{host} does not answer: .+\n", error)


def test_real_server_is_measured_and_refused_images_are_named(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for name in ("1.png", "3.png"):
        (images / name).write_bytes(encode_image(64, 64, seed=int(name[0])))
    (images / "2.png").write_text("no image")
    process = Process("--port", "0", "--device", "cpu")
    try:
        url = process.ready().url
        path = tmp_path / "report.json"
        flags = f"--url {url} --concurrency 2 --warmup 0 --duration 1 --json {path}"
        made = ["--images-per-request", "2", "--format", "png", "--size", "64x64"]
        assert bench.main(["serve", *flags.split(), *made]) == 0
        report = json.loads(path.read_text())
        assert bench.main(["serve", *flags.split(), "--images", str(images), "--duration", "0.2"]) == 0
    finally:
        process.kill()
    assert json.loads(path.read_text())["refused_images"] == {"2.png": "invalid_image"}
    assert report["refused_images"] == {}
    load = report["load"]
    assert set(load["statuses"]) == {"200"}
    assert load["connection_errors"] == {}
    assert load["images_per_s"] == pytest.approx(2 * load["ok_per_s"])
    assert report["server"]["graph_misses"] == pytest.approx(2 * load["requests"], abs=8)
    assert set(report["server"]["stage_ms"]) == {"read", "decode", "queue", "encode", "serialize"}
    assert report["server"]["device_busy"]["cpu"] > 0
    assert report["memory"]["max"] > 1e8

"""The command `bench serve`: images, reports, errors."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from service.bench import command as bench
from service.bench.fleet import Fleet, FleetError
from service.bench.load_report import Memory, format_report, summarize
from service.bench.photos import name_refused
from service.bench.scrape import Server, growth
from tests.support.app import encode_image
from tests.support.bench_load import measure, share
from tests.support.fake_server import OK, FakeServer, Reply, reply
from tests.support.process import Process
from tests.support.project import ROOT


def test_made_images_differ_and_are_sent_unchanged(tmp_path: Path) -> None:
    flags = ["--duration", "0.4", "--query", "pooling=mean", "--api-key", "secret", "--repeat-images"]
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
        flags = (
            f"--url {server.url} --warmup 0 --duration 1 --json {path} --images {tmp_path} --repeat-images"
        )
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

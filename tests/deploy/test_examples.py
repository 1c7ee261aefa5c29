"""The programs in deploy/examples, run as a user runs them, against real and fake servers."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pytest

from tests.support.app import encode_image
from tests.support.process import Process
from tests.support.project import ROOT

EXAMPLES = ROOT / "deploy/examples"


@dataclass(frozen=True)
class Seen:
    """A request that the fake server received."""

    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    at: float  # time.monotonic()


@dataclass
class Fake:
    """A server with a list of answers for each path. It gives each once, and the last again and again."""

    answers: dict[str, list[tuple[int, dict[str, str], Any]]] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    url: str = ""

    def answer(self, request: Seen) -> tuple[int, dict[str, str], Any]:
        self.seen.append(request)
        answers = self.answers[request.path]
        return answers.pop(0) if len(answers) > 1 else answers[0]


@pytest.fixture
def fake() -> Iterator[Fake]:
    server_side = Fake()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            seen = Seen(url.path, dict(parse_qsl(url.query)), headers, body, time.monotonic())
            status, more, content = server_side.answer(seen)
            data = json.dumps(content).encode()
            self.send_response(status)
            for name, value in {**more, "content-length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    server_side.url = f"http://127.0.0.1:{server.server_port}"
    yield server_side
    server.shutdown()
    thread.join()
    server.server_close()


def start(name: str, *arguments: str | Path, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def write_images(folder: Path, count: int) -> list[str]:
    """Writes small images, some into a subfolder. Returns their paths."""
    (folder / "deeper").mkdir(parents=True)
    paths = [f"{'deeper/' if n % 3 else ''}{n:03}.png" for n in range(count)]
    for n, path in enumerate(paths):
        (folder / path).write_bytes(encode_image(64, 64, seed=n))
    (folder / "notes.txt").write_text("no image")
    return paths


def lines_of(output: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def wait_for_lines(output: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while not output.exists() or output.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_folder_is_embedded_once_although_server_and_client_are_interrupted(tmp_path: Path) -> None:
    paths, output = write_images(tmp_path / "in", 80), tmp_path / "out.jsonl"
    server = Process("--port", "0", "--device", "cpu").ready()
    url = server.url
    arguments = (tmp_path / "in", output, "--sidecar", url, "--concurrency", "4")
    try:
        client = start("embed_folder.py", *arguments)
        wait_for_lines(output, 10)
        client.kill()
        client.communicate()
        num_before = output.read_bytes().count(b"\n")
        assert 10 <= num_before < 80
        with output.open("ab") as file:
            file.write(b'{"path": "cut off wh')

        client = start("embed_folder.py", *arguments)
        wait_for_lines(output, num_before + 10)
        server.kill()
        assert client.poll() is None, "the server stopped too late to interrupt the client"
        server = Process("--port", url.rsplit(":", 1)[1], "--device", "cpu").ready()
        code, _, said = finish(client)
        assert (code, "are missing" in said) == (0, True), said
    finally:
        server.kill()
    lines = lines_of(output)
    assert sorted(line["path"] for line in lines) == sorted(paths)
    assert len({line["sha256"] for line in lines}) == 80
    vector = np.frombuffer(base64.b64decode(lines[0]["embedding"]), "<f4")
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


def embedding_answer(fingerprint: str = "f") -> dict[str, Any]:
    return {"fingerprint": fingerprint, "data": [{"sha256": "s", "embedding": "AACAPw=="}]}


@pytest.mark.parametrize("status", [429, 503])
def test_server_that_is_full_or_stops_is_asked_again_after_retry_after(
    status: int, fake: Fake, tmp_path: Path
) -> None:
    write_images(tmp_path / "in", 1)
    fake.answers["/embed"] = [(status, {"Retry-After": "1"}, {}), (200, {}, embedding_answer())]
    arguments = (tmp_path / "in", tmp_path / "out.jsonl", "--sidecar", fake.url)
    code, _, said = finish(start("embed_folder.py", *arguments, SIDECAR_API_KEY="secret"))
    assert code == 0, said
    first, second = fake.seen
    assert second.at - first.at >= 1
    assert first.headers["authorization"] == "Bearer secret"
    assert first.body == second.body == encode_image(64, 64, seed=0)
    assert len(lines_of(tmp_path / "out.jsonl")) == 1


@pytest.mark.parametrize(
    ("answer", "said", "num_lines"),
    [
        ((400, {}, {"error": {"code": "invalid_image"}}), "000.png: 400", 2),
        ((500, {}, {"error": {"code": "internal_error"}}), "000.png: 500", 2),
        ((401, {}, {"error": {"code": "unauthorized"}}), "401", 0),
        ((503, {"Retry-After": "10"}, {}), "gave up", 0),
        ((200, {}, embedding_answer("other")), "cannot be compared", 1),
        ((200, {}, {"is": "another server"}), "/embed?encoding_format=base64 is not vision-sidecar", 0),
    ],
)
def test_reason_for_failure_is_printed(
    answer: tuple[int, dict[str, str], Any], said: str, num_lines: int, fake: Fake, tmp_path: Path
) -> None:
    write_images(tmp_path / "in", 3)
    fake.answers["/embed"] = [answer, (200, {}, embedding_answer())]
    arguments = (tmp_path / "in", tmp_path / "out.jsonl", "--sidecar", fake.url, "--concurrency", "1")
    code, _, error = finish(start("embed_folder.py", *arguments, "--patience-s", "1"))
    assert code == 1
    assert said in error
    assert "Traceback" not in error
    assert len(lines_of(tmp_path / "out.jsonl")) == num_lines


def test_missing_server_is_waited_for_until_patience_ends(tmp_path: Path) -> None:
    write_images(tmp_path / "in", 3)
    arguments = (tmp_path / "in", tmp_path / "out.jsonl", "--sidecar", "http://127.0.0.1:9")
    code, _, error = finish(start("embed_folder.py", *arguments, "--patience-s", "0.5"))
    assert code == 1
    assert "gave up after 0.5 s" in error
    assert "Traceback" not in error


# Folder, file, content of the file before the run, and the message.
UNUSABLE = [
    ("on", "out", None, "on cannot be read: No such file or directory"),
    ("in/000.png", "out", None, "in/000.png cannot be read: Not a directory"),
    ("in", "none/out", None, "none/out cannot be written: No such file or directory"),
    ("in", "in", None, "in cannot be written: Is a directory"),
    ("in", "out", b"no JSON\n", "out was not written by this program"),
    ("in", "out", b"[]\n", "out was not written by this program"),
    ("in", "out", b'{"x": 1}\n', "out was not written by this program"),
    ("in", "out", b"\xff\xfe\n", "out was not written by this program"),
    ("in", "out", b"one line that must not be deleted", "out was not written by this program"),
    ("in", "out", b'{"p": "nor this"}', "out was not written by this program"),
]


@pytest.mark.parametrize(("folder", "file", "content", "said"), UNUSABLE)
def test_unusable_folder_or_file_is_one_line_and_is_not_changed(
    folder: str, file: str, content: bytes | None, said: str, tmp_path: Path
) -> None:
    write_images(tmp_path / "in", 1)
    if content is not None:
        (tmp_path / file).write_bytes(content)
    process = start("embed_folder.py", tmp_path / folder, tmp_path / file, "--sidecar", "http://127.0.0.1:9")
    code, _, error = finish(process)
    assert (code, error.count("\n")) == (2, 1)
    assert said in error
    path = tmp_path / file
    assert (path.read_bytes() if path.is_file() else None) == content


def test_concurrency_of_zero_is_refused(tmp_path: Path) -> None:
    write_images(tmp_path / "in", 1)
    arguments = (tmp_path / "in", tmp_path / "out", "--concurrency", "0")
    code, _, error = finish(start("embed_folder.py", *arguments))
    assert code == 2
    assert "--concurrency: must be at least 1" in error


REPLY = {"choices": [{"message": {"role": "assistant", "content": "A cat and a dog."}}]}
MODELS = {"data": [{"id": "the-model"}]}


def test_chat_has_the_images_in_order_before_the_question(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "one.jpg").write_bytes(b"one")
    (tmp_path / "two.png").write_bytes(b"two")
    fake.answers = {"/v1/models": [(200, {}, MODELS)], "/v1/chat/completions": [(200, {}, REPLY)]}
    arguments = ("What is it?", tmp_path / "one.jpg", tmp_path / "two.png", "--sidecar", fake.url)
    assert finish(start("chat.py", *arguments, SIDECAR_API_KEY="a")) == (0, "A cat and a dog.\n", "")
    models, chat = fake.seen
    assert models.headers["authorization"] == chat.headers["authorization"] == "Bearer a"
    sent = json.loads(chat.body)
    assert sent["model"] == "the-model"
    [message] = sent["messages"]
    *parts, question = message["content"]
    assert [part["image_url"]["url"] for part in parts] == [
        "data:image/jpeg;base64,b25l",
        "data:image/png;base64,dHdv",
    ]
    assert question == {"type": "text", "text": "What is it?"}


def test_named_model_is_not_looked_up(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "one.jpg").write_bytes(b"one")
    fake.answers = {"/v1/chat/completions": [(200, {}, REPLY)]}
    arguments = ("What is it?", tmp_path / "one.jpg", "--sidecar", fake.url, "--model", "mine")
    assert finish(start("chat.py", *arguments))[0] == 0
    [chat] = fake.seen
    assert json.loads(chat.body)["model"] == "mine"


@pytest.mark.parametrize(("name", "said"), [("on.jpg", "No such file or directory"), (".", "Is a directory")])
def test_unreadable_image_is_one_line(name: str, said: str, tmp_path: Path) -> None:
    code, out, error = finish(start("chat.py", "What is it?", tmp_path / name))
    assert (code, out, error.count("\n")) == (1, "", 1)
    assert said in error


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (
            {"/v1/models": (502, {}, {"error": {"message": "the LLM server cannot be reached"}})},
            "URL/v1/models {refused} 502 the LLM server cannot be reached",
        ),
        ({"/v1/models": (502, {}, "bad")}, 'URL/v1/models {refused} 502 "bad"'),
        (
            {"/v1/models": (200, {}, {"data": []})},
            "URL/v1/models sent an unexpected answer: '{\"data\": []}'",
        ),
        (
            {
                "/v1/models": (200, {}, MODELS),
                "/v1/chat/completions": (401, {}, {"error": {"message": "no key"}}),
            },
            "URL/v1/chat/completions {refused} 401 no key",
        ),
    ],
)
def test_error_names_the_url_and_the_reason(
    answers: dict[str, tuple[int, dict[str, str], Any]], message: str, fake: Fake, tmp_path: Path
) -> None:
    (tmp_path / "one.jpg").write_bytes(b"one")
    fake.answers = {path: [answer] for path, answer in answers.items()}
    arguments = ("What is it?", tmp_path / "one.jpg", "--sidecar", fake.url)
    expected = message.replace("URL", fake.url).replace("{refused}", "refused the request:")
    assert finish(start("chat.py", *arguments)) == (1, "", f"{expected}\n")


def test_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.jpg").write_bytes(b"one")
    code, out, error = finish(
        start("chat.py", "What is it?", tmp_path / "one.jpg", "--sidecar", "http://127.0.0.1:9")
    )
    assert (code, out) == (1, "")
    assert re.fullmatch(r"http://127\.0\.0\.1:9/v1/models does not answer: .*refused\n", error)


@pytest.mark.parametrize("name", ["embed_folder.py", "chat.py"])
def test_url_without_scheme_is_refused(name: str) -> None:
    code, _, error = finish(start(name, "a", "b", "--sidecar", "localhost:8080"))
    assert code == 2
    assert "'localhost:8080' is not a URL such as http://127.0.0.1:8080" in error


@pytest.mark.parametrize("script", ["examples/embed_folder.py", "examples/chat.py", "ray/check.py"])
def test_missing_package_is_one_line_that_says_what_to_do(script: str) -> None:
    command = [sys.executable, "-I", "-S", str(ROOT / "deploy" / script), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert re.fullmatch(rf"\w+ is not installed for {re.escape(sys.executable)}\. Use .+\n", done.stderr)

"""The commands and the Python in the documents are run as they stand, and their output is checked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load

from tests.support.answers import from_json, from_npy, from_safetensors, from_vllm
from tests.support.app import encode_image
from tests.support.process import Process
from tests.support.project import DOCUMENTS, ROOT

SIDECAR, LLM = "localhost:8080", "localhost:8000"
FILES = {"photo.jpg": 1, "one.jpg": 2, "two.png": 3}  # name → seed of its noise
CHAT = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Noise."}}],
}


def file_of(name: str) -> bytes:
    return encode_image(200, 300, format="PNG" if name.endswith("png") else "JPEG", seed=FILES[name])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the documents name."""
    for name in FILES:
        (tmp_path / name).write_bytes(file_of(name))
    return tmp_path


def commands(*documents: Path) -> list[str]:
    """The commands that send a request to the server, each with its continuation lines."""
    pattern = re.compile(r"^    ((?:curl |\().*(?:(?<=[\\|])\n.*)*)$", re.MULTILINE)
    found = [command for document in documents for command in pattern.findall(document.read_text())]
    return [command for command in found if SIDECAR in command]


def programs() -> list[str]:
    """The Python programs: indented blocks that begin with an import."""
    pattern = re.compile(r"^(    (?:import|from) .*\n(?:    .*\n|\n(?=    ))*)", re.MULTILINE)
    blocks = [block for document in DOCUMENTS for block in pattern.findall(document.read_text())]
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in blocks]


def run_command(command: str, url: str, folder: Path) -> bytes:
    """The body that curl received, on standard output or in the file that the command names."""
    script = 'curl() { command curl --silent --show-error --fail "$@"; }\n' + command
    done = subprocess.run(
        ["sh", "-c", script.replace(SIDECAR, url)], cwd=folder, capture_output=True, timeout=60
    )
    assert done.returncode == 0, (command, done.stderr)
    file = re.search(r" -o (\S+)", command)
    return (folder / file[1]).read_bytes() if file else done.stdout


def decode(command: str, body: bytes) -> list[torch.Tensor]:
    """The embeddings of an answer, in the form that the command asks for."""
    if "safetensors" in command:
        return from_safetensors(body)
    if "npy" in command:
        rows = from_npy(body)
        return [rows] if "pooling=none" in command else list(rows)
    return from_vllm(body) if "vllm" in command else from_json(body)


def handed_over(body: bytes, url: str) -> list[torch.Tensor]:
    """The tokens that an answer to `format=handoff` names."""
    files = [httpx.get(f"{url}/handoff/{item['uuid']}") for item in json.loads(body)["data"]]
    return [load(file.raise_for_status().content)["tokens"] for file in files]


def expected(command: str, url: str) -> list[torch.Tensor]:
    """The embeddings of the command's files in float32, requested together as in the command."""
    options = {"encoding_format": "base64", "normalize": "false" if "normalize=false" in command else "true"}
    is_for_llm = "vllm" in command or "handoff" in command
    if "pooling=none" in command or is_for_llm:
        options["pooling"], options["normalize"] = "none", "false"
        options["deepstack"] = "true" if "deepstack=true" in command or is_for_llm else "false"
    names = re.findall(r"photo\.jpg|one\.jpg|two\.png", command)
    files = [("image", (name, file_of(name))) for name in names]
    return from_json(httpx.post(f"{url}/embed", files=files, data=options).raise_for_status().content)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=f"{path.name} {i}")
        for path in DOCUMENTS
        for i, command in enumerate(commands(path))
    ],
)
def test_a_command_answers_the_vectors_of_its_images(command: str, server_url: str, folder: Path) -> None:
    body = run_command(command, server_url, folder)
    if "/info" in command:
        assert json.loads(body)["model"] == "demo"
        return
    is_handed_over = "handoff" in command
    embeddings = handed_over(body, server_url) if is_handed_over else decode(command, body)
    for got, true in zip(embeddings, expected(command, server_url), strict=True):
        assert torch.equal(got, true.to(got.dtype)), command


def test_the_readme_has_a_command_for_each_form() -> None:
    readme = "\n".join(commands(ROOT / "README.md"))
    for form in ("encoding_format=base64", "safetensors", "npy", "vllm", "/v1/embeddings", "-F ", "-d @-"):
        assert form in readme, form
    assert len(commands(*DOCUMENTS)) >= 15


def tokens_of(part: dict[str, Any], store: Path) -> torch.Tensor:
    """The tokens that a content part brings, or that the store has under its uuid."""
    if "image_embeds" in part["image_embeds"]:
        # The `token_width` of the demo model: vLLM knows it from its own configuration.
        [tokens] = from_vllm(json.dumps({"content": [part], "token_width": 384}).encode())
        return tokens
    return load((store / f"{part['uuid']}.safetensors").read_bytes())["tokens"]


class FakeLLM(BaseHTTPRequestHandler):
    """Stands in for vLLM: takes the content parts of a message by its rules."""

    store: Path

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        part, question = request["messages"][0]["content"]
        t, h, w = part["image_embeds"]["image_grid_thw"]
        fits = len(tokens_of(part, self.store)) == t * h * w // 4
        self._answer(CHAT if question["type"] == "text" and fits else {})

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "demo", "object": "model"}]})

    def _answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


@pytest.fixture
def llm_url(tmp_path: Path) -> Iterator[str]:
    handler = type("FakeLLM", (FakeLLM,), {"store": tmp_path / "tokens"})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def door_url(tmp_path: Path, llm_url: str) -> Iterator[str]:
    """A server in front of the LLM server."""
    flags = ("--port", "0", "--device", "cpu", "--decode-threads", "2", "--llm-url", llm_url)
    process = Process(*flags, "--handoff-dir", str(tmp_path / "tokens")).ready()
    yield process.url
    process.kill()


def test_the_python_of_the_documents_runs(door_url: str, llm_url: str, folder: Path) -> None:
    assert len(programs()) >= 6
    [writes_file] = [command for command in commands(ROOT / "docs/api.md") if "-o tokens.safe" in command]
    run_command(writes_file, door_url, folder)
    program = "\n".join(programs()).replace(f"http://{SIDECAR}", door_url).replace(f"http://{LLM}", llm_url)
    command = [sys.executable, "-W", "ignore", "-c", program]  # one process: imports take seconds
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "torch.bfloat16\n" in done.stdout
    # Through the door, with the connector alone, with tensors in the body.
    assert done.stdout.endswith("Noise.\n" * 3)

"""Mixed traffic for minutes against a server process: wrong answers, errors, and what grows.

Run by `make soak`. `SOAK_MINUTES` says for how long. `VISION_SIDECAR_API_SERVER_COUNT` makes it several
processes; memory and files are those of all.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from tests.support.image_files import chunk
from tests.support.project import ROOT
from tests.support.traffic import Scrape, as_bytes, call, leave, post

NUM_CALLERS = 6
SAMPLE_EVERY_S = 2.0
MAX_GROWTH_BYTES = 40e6  # of a process's memory, from the median of the second fifth to that of the last
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
# Memory that is free goes back to the system, and what grows is what is held. glibc else keeps most of it.
HONEST_MALLOC = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "MALLOC_TRIM_THRESHOLD_": "16777216",
}
FAULTS = re.compile(r" (WARNING|ERROR|CRITICAL) ")


@dataclass(frozen=True)
class Picture:
    """A file to send, by the name under which its first answer is kept."""

    name: str
    data: bytes


@dataclass
class Tally:
    """What came back."""

    num_sent: int = 0
    num_left: int = 0
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)  # by kind of request and status
    vectors: dict[str, list[float]] = field(default_factory=dict)  # first answers, by picture
    failures: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    open_files: list[int] = field(default_factory=list)


def pictures() -> list[Picture]:
    """Many sizes and forms, from a pixel to more than the model's limit."""
    rng = np.random.default_rng(7)
    found = []
    for index in range(60):
        height, width = (int(side) for side in np.exp(rng.uniform(np.log(8), np.log(1500), 2)))
        mode = ("RGB", "RGBA", "L")[index % 3]
        file_format = FORMATS[index % len(FORMATS)]
        if file_format == "JPEG" and mode == "RGBA":
            mode = "CMYK"
        small = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((width, height)).convert(mode)
        if max(height, width) / min(height, width) < 150:
            file = io.BytesIO()
            image.save(file, file_format)
            found.append(Picture(f"{index} {file_format} {mode} {height}x{width}", file.getvalue()))
    return found


def hostile(rng: random.Random, some: bytes) -> tuple[str, bytes, int]:
    """A request that must be refused: its kind, its bytes and the status."""
    bomb = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", b"\0\0\xea\x60\0\0\xea\x60\x08\x02\0\0\0") + chunk(b"IEND", b"")
    )
    thin = io.BytesIO()
    Image.new("RGB", (2001, 10)).save(thin, "PNG")
    return rng.choice(
        [
            ("noise", post(rng.randbytes(rng.randrange(1, 5000))), 400),
            ("cut file", post(some[: len(some) // 2]), 400),
            ("thin", post(thin.getvalue()), 400),
            ("bomb", post(bomb), 413),
            ("empty", post(b""), 400),
            ("one bad of three", post(some, rng.randbytes(500), some), 400),
            ("too many", post(*[b"x"] * 33), 413),
            ("no JSON", _typed(b'{"images": [', "application/json"), 400),
            ("wrong shape", _typed(b'{"images": 5}', "application/json"), 422),
            ("no base64", _typed(b'{"images": ["%%%%"]}', "application/json"), 400),
            ("no form", _typed(b"a=b", "application/x-www-form-urlencoded"), 415),
            ("no option", post(some, query="?pooling=max"), 400),
            ("no format", post(some, query="?pooling=mean&deepstack=true"), 400),
        ]
    )


def _typed(body: bytes, content_type: str) -> bytes:
    headers = {"content-type": content_type}
    return as_bytes(httpx.Request("POST", "http://sidecar/embed", content=body, headers=headers))


class Caller:
    """One of several that send at once, each request chosen at random."""

    def __init__(self, port: int, files: Sequence[Picture], tally: Tally, client: httpx.AsyncClient) -> None:
        self._port = port
        self._files = files
        self._tally = tally
        self._client = client

    async def run(self, rng: random.Random, until: float) -> None:
        while time.monotonic() < until:
            act = rng.choices([self._embed, self._refused, self._leave], [6, 2, 2])[0]
            self._tally.num_sent += 1
            try:
                await act(rng)
            except Exception as error:
                self._tally.failures.append(f"{act.__name__}: {error!r}")

    async def _embed(self, rng: random.Random) -> None:
        chosen = rng.choices(self._files, k=rng.choice([1, 1, 1, 2, 3, 6]))
        kind = rng.choice(["form", "json", "raw" if len(chosen) == 1 else "form"])
        if kind == "json":
            images = [base64.b64encode(picture.data).decode() for picture in chosen]
            response = await self._client.post("/embed", json={"images": images})
        elif kind == "raw":
            headers = {"content-type": "application/octet-stream"}
            response = await self._client.post("/embed", content=chosen[0].data, headers=headers)
        else:
            files = [("image", ("image", picture.data, "image/png")) for picture in chosen]
            response = await self._client.post("/embed", files=files)
        self._tally.answers[kind, response.status_code] += 1
        assert response.status_code == 200, response.text
        for picture, entry in zip(chosen, response.json()["data"], strict=True):
            first = self._tally.vectors.setdefault(picture.name, entry["embedding"])
            np.testing.assert_allclose(entry["embedding"], first, atol=1e-5, err_msg=picture.name)

    async def _refused(self, rng: random.Random) -> None:
        kind, request, status = hostile(rng, rng.choice(self._files[:20]).data)
        answer = await call(self._port, request)
        self._tally.answers[kind, answer.status] += 1
        assert answer.status == status, f"{kind}: {answer.body}"

    async def _leave(self, rng: random.Random) -> None:
        request = post(*(picture.data for picture in rng.choices(self._files, k=rng.choice([1, 4]))))
        num_bytes = rng.choice([len(request), rng.randrange(len(request))])
        wait_s = rng.expovariate(20)
        await leave(self._port, request, num_bytes=num_bytes, wait_s=wait_s, reset=rng.random() < 0.5)
        self._tally.num_left += 1


@dataclass(frozen=True)
class Processes:
    """Those of one server."""

    all: Sequence[psutil.Process]

    @property
    def memory(self) -> int:
        """Bytes that are no other process's."""
        return sum(process.memory_full_info().uss for process in self.all)

    @property
    def open_files(self) -> int:
        return sum(process.num_fds() for process in self.all)


async def send_all(port: int, processes: Processes, seconds: float) -> Tally:
    tally, files, until = Tally(), pictures(), time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        callers = [Caller(port, files, tally, client) for _ in range(NUM_CALLERS)]
        running = [
            asyncio.create_task(caller.run(random.Random(n), until)) for n, caller in enumerate(callers)
        ]
        while time.monotonic() < until:
            await asyncio.sleep(SAMPLE_EVERY_S)
            tally.memory.append(processes.memory)
            tally.open_files.append(processes.open_files)
        await asyncio.gather(*running)
    return tally


def warm_up(url: str, number: int) -> None:
    """Requests on connections of their own, as an API server opens some files with its first."""
    for _ in range(number):
        headers = {"content-type": "application/octet-stream"}
        httpx.post(f"{url}/embed", content=pictures()[0].data, headers=headers).raise_for_status()


def fifth(values: Sequence[int], number: int) -> float:
    """The median of one of five equal parts."""
    length = len(values) // 5
    return statistics.median(values[number * length : (number + 1) * length])


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def server(log_file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server with the demo model. Its log goes to a file, as a full pipe would hold it up."""
    command = [sys.executable, "-m", "service", "serve", "--port", "0", "--device", "cpu"]
    with (
        log_file.open("wb") as file,
        subprocess.Popen(command, cwd=ROOT, stderr=file, env={**os.environ, **HONEST_MALLOC}) as process,
    ):
        yield process
        process.kill()


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_mixed_traffic_for_minutes(server: subprocess.Popen[bytes], log_file: Path) -> None:
    while "ready: model" not in log_file.read_text():
        assert server.poll() is None
        time.sleep(0.1)
    [url] = re.findall(r"listening on (\S+)", log_file.read_text())
    parent = psutil.Process(server.pid)
    processes = Processes([parent, *parent.children(recursive=True)])
    warm_up(url, len(processes.all))
    files_before = processes.open_files
    seconds = 60 * float(os.environ.get("SOAK_MINUTES", "10"))
    tally = asyncio.run(send_all(int(url.rsplit(":", 1)[1]), processes, seconds))
    time.sleep(3)  # longer than a connection that was refused in its body is kept
    scrape = Scrape(httpx.get(f"{url}/metrics").text)
    files_after = processes.open_files
    server.terminate()
    exit_code = server.wait(60)
    statuses = scrape.statuses()
    growth = fifth(tally.memory, 4) - fifth(tally.memory, 1)
    print(  # noqa: T201
        f"\n{seconds:g} s: {tally.num_sent} requests, {tally.num_left} left, {len(tally.failures)} failures;"
        f" by status {json.dumps(statuses)}; {scrape.total('images_total'):g} images encoded\n"
        + "\n".join(f"  {kind} {status}: {count}" for (kind, status), count in sorted(tally.answers.items()))
        + "\nmemory by fifths, MB: "
        + " ".join(f"{fifth(tally.memory, n) / 1e6:.0f}" for n in range(5))
        + f", grown by {growth / 1e6:.1f}; open files by fifths: "
        + " ".join(f"{fifth(tally.open_files, n):g}" for n in range(5))
        + f", {files_before} before and {files_after} after"
    )
    assert tally.failures[:5] == []
    assert sum(statuses.values()) == tally.num_sent + len(processes.all)
    scrape.check_at_rest()
    assert [line for line in log_file.read_text().splitlines() if FAULTS.search(line)][1:] == []  # the demo's
    assert exit_code == 0
    assert files_after <= files_before + 1  # the connection that asks
    assert growth < MAX_GROWTH_BYTES * len(processes.all)

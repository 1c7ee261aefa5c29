"""Chats for minutes through a server with a small store that evicts all the time; then the server is killed.

Run by `make soak`. `SOAK_MINUTES` says for how long: half of the time without kills, to see what grows. A
stand-in for the LLM server reads every entry that a chat names, and compares it with the encoder, to the bit.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from models import EncodeItem, OutputSpec, VisionEncoder
from tests.support.chats import CHAT, chat, image_part
from tests.support.llm_server import Asked, LlmServer, answer
from tests.support.project import ROOT
from tests.support.traffic import Scrape

NUM_CALLERS = 6
NUM_IMAGES = 160
STORE_BYTES = 6_000_000  # about half of what all images need
LEASE_S = 1.0  # longer than a busy machine keeps a process waiting
MAX_GROWTH_BYTES = 40e6
# The encoder then computes each image by itself, with the same order of additions as in this process.
ALONE = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "MALLOC_TRIM_THRESHOLD_": "16777216"}


@dataclass
class Tally:
    """What came back, and what the LLM server saw."""

    statuses: Counter[int] = field(default_factory=Counter)
    num_broken: int = 0  # chats without an answer, because the server was killed
    num_read: int = 0
    wrong: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def expected() -> dict[bytes, torch.Tensor]:
    """The tokens of each image, by its file."""
    encoder = VisionEncoder.from_pretrained("demo", device="cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    found = {}
    for _ in range(NUM_IMAGES):
        height, width = (int(side) for side in rng.integers(64, 400, 2))
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG", compress_level=1)
        item = EncodeItem(encoder.preprocess(pixels), OutputSpec())
        found[file.getvalue()] = encoder.run([item]).embeddings[0].clone()
    torch.set_num_threads(before)
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as parent:
        yield Path(parent) / "tokens"


class Server:
    """The server's processes, and what they wrote to the log."""

    def __init__(self, folder: Path, llm_url: str, log: Path) -> None:
        self._flags = ["--port", "0", "--device", "cpu", "--api-server-count", "2", "--llm-url", llm_url]
        self._flags += ["--handoff-dir", str(folder), "--handoff-bytes", str(STORE_BYTES)]
        self._flags += ["--handoff-lease-s", str(LEASE_S), "--max-batch-tokens", "1"]
        self._log = log
        self.start()

    def start(self) -> None:
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "service", "serve", *self._flags],
                cwd=ROOT,
                stderr=file,
                env={**os.environ, **ALONE},
                process_group=0,
            )
        while "ready: model" not in self._log.read_text():
            assert self._process.poll() is None, self._log.read_text()
            time.sleep(0.1)
        [self.url] = re.findall(r"listening on (\S+)", self._log.read_text())
        parent = psutil.Process(self._process.pid)
        self.processes = [parent, *parent.children(recursive=True)]

    def kill(self, victims: Sequence[psutil.Process]) -> None:
        """Kills some processes, and waits until the whole server has ended, as it then must."""
        for victim in victims:
            victim.kill()
        self._process.wait(60)
        psutil.wait_procs(self.processes, timeout=60)
        assert not any(process.is_running() for process in self.processes)

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)


def reading(folder: Path, images: dict[bytes, torch.Tensor], tally: Tally) -> LlmServer:
    """The LLM server: reads what each chat names, some of it late."""
    rng = random.Random(0)
    ok = answer()

    async def script(asked: Asked) -> None:
        if rng.random() < 0.1:
            await asyncio.sleep(3 * LEASE_S)  # the door renews the lease, unless the client has left
        if asked.has_left.is_set():
            return
        body = json.loads(asked.body)
        for part, number in zip(body["messages"][0]["content"], body["numbers"], strict=True):
            try:
                check(folder / f"{part['uuid']}.safetensors", list(images.values())[number])
                tally.num_read += 1
            except (OSError, AssertionError) as error:
                tally.wrong.append(repr(error)[:200])
        await ok(asked)

    return LlmServer(script)


def check(path: Path, tokens: torch.Tensor) -> None:
    """Compares an entry with the encoder's own tokens, to the bit."""
    with safe_open(path, "pt") as file:
        found = file.get_tensor("tokens")
    assert found.shape == tokens.shape, path.name
    assert torch.equal(found, tokens), path.name


async def chats(url: str, images: Sequence[bytes], tally: Tally, seconds: float, seed: int) -> None:
    """Callers that send chats with one to three images, and leave some of them early."""
    until = time.monotonic() + seconds

    async def call(client: httpx.AsyncClient, rng: random.Random) -> None:
        while time.monotonic() < until:
            numbers = rng.choices(range(len(images)), k=rng.choice([1, 1, 2, 3]))
            body = chat(*(image_part(images[number]) for number in numbers)) | {"numbers": numbers}
            try:
                async with asyncio.timeout(rng.choice([60, 60, 60, 0.05])):
                    response = await client.post(CHAT, json=body)
                tally.statuses[response.status_code] += 1
                if response.status_code == 429:
                    await asyncio.sleep(LEASE_S / 2)
            except TimeoutError:
                pass
            except httpx.TransportError:
                tally.num_broken += 1
                await asyncio.sleep(0.05)

    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await asyncio.gather(*(call(client, random.Random(seed * 100 + n)) for n in range(NUM_CALLERS)))


def seconds_of_a_half() -> float:
    return 30 * float(os.environ.get("SOAK_MINUTES", "10"))


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_store_under_eviction_for_minutes(
    expected: dict[bytes, torch.Tensor], folder: Path, tmp_path: Path
) -> None:
    tally, memory, files = Tally(), [], []
    with reading(folder, expected, tally) as llm:
        server = Server(folder, llm.url, tmp_path / "log")
        for part in range(10):
            asyncio.run(chats(server.url, list(expected), tally, seconds_of_a_half() / 10, part))
            memory.append(sum(process.memory_full_info().uss for process in server.processes))
            files.append(sum(process.num_fds() for process in server.processes))
            stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            assert stored <= STORE_BYTES
        scrape = Scrape(httpx.get(f"{server.url}/metrics").text)
        evictions = scrape.total("handoff_evictions_total")
        left_over = sorted(path.suffix for path in folder.iterdir() if path.suffix in (".part", ".claim"))
        assert server.stop() == 0
    print(  # noqa: T201
        f"\n{dict(tally.statuses)}, {tally.num_read} entries read, {evictions:g} evicted, memory in MB "
        f"{[round(value / 1e6) for value in memory]}, files {files}"
    )
    assert tally.wrong[:5] == []
    assert set(tally.statuses) <= {200, 429}
    assert tally.num_broken == 0
    assert tally.num_read > 100
    assert evictions > 100
    assert left_over == []
    assert memory[-1] - memory[2] < MAX_GROWTH_BYTES * len(server.processes)
    assert files[-1] <= files[2] + 2 * NUM_CALLERS  # connections to the LLM server


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_kills_at_random_moments_leave_no_wrong_tokens(
    expected: dict[bytes, torch.Tensor], folder: Path, tmp_path: Path
) -> None:
    tally, rng, end = Tally(), random.Random(1), time.monotonic() + seconds_of_a_half()
    kills: Counter[str] = Counter()
    with reading(folder, expected, tally) as llm:
        server = Server(folder, llm.url, tmp_path / "log")
        while time.monotonic() < end:
            kind = rng.choice(["one", "one", "one", "all"])
            victims = server.processes if kind == "all" else [rng.choice(server.processes[1:])]
            kills[kind if kind == "all" else victims[0].cmdline()[-1][:40]] += 1

            async def load_and_kill(
                running: Server = server, killed: Sequence[psutil.Process] = victims
            ) -> None:
                loading = asyncio.create_task(
                    chats(running.url, list(expected), tally, 4.0, rng.randrange(2**20))
                )
                await asyncio.sleep(rng.uniform(0.5, 3.5))
                await asyncio.to_thread(running.kill, killed)
                await loading

            asyncio.run(load_and_kill())
            before = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
            server.start()
            names = {path.name for path in folder.iterdir()}
            assert not [name for name in names if name.endswith((".part", ".claim"))]
            for name, data in before.items():  # those that were kept are as they were
                assert name not in names or (folder / name).read_bytes() == data
        asyncio.run(chats(server.url, list(expected), tally, 2.0, 0))
        assert server.stop() == 0
    print(  # noqa: T201
        f"\n{dict(tally.statuses)}, {tally.num_broken} broken, {tally.num_read} entries read, "
        f"kills {dict(kills)}"
    )
    assert tally.wrong[:5] == []
    assert set(tally.statuses) <= {200, 429, 499, 500, 502, 503, 504}
    assert tally.num_read > 100
    shutil.rmtree(folder)

"""Embeds every image of a folder into one file, and goes on where it stopped.

    python embed_folder.py photos/ photos.jsonl

A line for each image: {"path", "sha256", "fingerprint", "embedding"}; the embedding is base64 of float32,
little-endian, which `numpy.frombuffer(base64.b64decode(text), "<f4")` reads. What is in the file already is
not sent again, so run it again after an interruption, or when images were added.

A server that is full, restarts or cannot be reached is waited for. An image that it refuses is named at the
end, and the exit code is then 1. It is 2 where the folder cannot be read or nothing can be added to the file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import httpx
from tqdm import tqdm

SUFFIXES = frozenset([".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif"])
# Full, restarting, or behind a proxy that cannot reach it.
TRY_AGAIN = frozenset({408, 429, 502, 503, 504})
LONGEST_PAUSE_S = 10.0
BEGINNING = b'{"path": "'  # of every line


class Refused(Exception):
    """The server does not take this image, now or later."""


class GivenUp(Exception):
    """Nothing works any more: the server is gone for too long, or serves another model."""


class Unusable(Exception):
    """The folder or the file is not what it should be."""


@dataclass(frozen=True)
class Line:
    """One line of the file."""

    path: str  # in the folder, with slashes
    sha256: str
    fingerprint: str
    embedding: str  # base64 of little-endian float32


class Output:
    """The file: lines that are there, and lines that are added. Not for several processes at once."""

    def __init__(self, path: Path) -> None:
        self.paths: set[str] = set()
        self._fingerprint: str | None = None
        try:
            self._file: BinaryIO = path.open("a+b")
        except OSError as error:
            raise Unusable(f"{path} cannot be written: {error.strerror}") from None
        try:
            self._read()
        except (TypeError, ValueError):
            raise Unusable(f"{path} holds something else than lines of this program") from None

    def _read(self) -> None:
        """Raises `TypeError` or `ValueError` where something else is in it."""
        self._file.seek(0)
        end = 0
        for line in self._file:
            if line.endswith(b"\n"):
                self._remember(Line(**json.loads(line)))
                end += len(line)
            elif line[: len(BEGINNING)] != BEGINNING[: len(line)]:
                raise ValueError("not cut off while it was written, but another file")
        self._file.truncate(end)

    def _remember(self, line: Line) -> None:
        if self._fingerprint not in (None, line.fingerprint):
            raise GivenUp("the server's fingerprint is not the file's: their vectors cannot be compared")
        self._fingerprint = line.fingerprint
        self.paths.add(line.path)

    def add(self, line: Line) -> None:
        self._remember(line)
        self._file.write(json.dumps(vars(line)).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Embedder:
    """Sends images to the server, and sends them again where that can help."""

    client: httpx.AsyncClient
    patience_s: float  # for one image, from the first failure on

    async def embed(self, folder: Path, path: str) -> Line:
        """Raises `Refused`, `GivenUp`."""
        image = await asyncio.to_thread((folder / path).read_bytes)
        deadline: float | None = None
        for attempt in range(sys.maxsize):
            answer, reason = await self._try(image)
            if answer is not None and answer.status_code not in TRY_AGAIN:
                return _read_answer(path, answer)
            deadline = deadline or time.monotonic() + self.patience_s
            pause = _pause_s(answer, attempt)
            if time.monotonic() + pause > deadline:
                raise GivenUp(f"gave up after {self.patience_s:g} s: {reason}")
            await asyncio.sleep(pause)
        raise AssertionError("the loop has no end")

    async def _try(self, image: bytes) -> tuple[httpx.Response | None, str]:
        try:
            answer = await self.client.post(
                "/embed",
                params={"encoding_format": "base64"},
                headers={"Content-Type": "application/octet-stream"},
                content=image,
            )
        except httpx.TransportError as error:
            return None, str(error) or type(error).__name__
        return answer, f"{answer.status_code} {answer.text[:200]}"


def _pause_s(answer: httpx.Response | None, attempt: int) -> float:
    """What the server asks for, else longer and longer; not the same for all, or they would meet again."""
    asked = answer.headers.get("Retry-After", "") if answer is not None else ""
    pause = float(asked) if asked.isdecimal() else min(LONGEST_PAUSE_S, 0.25 * 2 ** min(attempt, 10))
    return pause * (1 + 0.25 * random.random())


def _read_answer(path: str, answer: httpx.Response) -> Line:
    if answer.status_code in (401, 403, 404):  # true of every image
        raise GivenUp(f"{answer.status_code} {answer.text[:200]}")
    if answer.is_error:
        raise Refused(f"{answer.status_code} {answer.text[:200]}")
    body: dict[str, Any] = answer.json()
    [image] = body["data"]
    return Line(path, image["sha256"], body["fingerprint"], image["embedding"])


async def embed_all(
    folder: Path, paths: list[str], output: Output, embedder: Embedder, concurrency: int
) -> dict[str, str]:
    """Embeds all; returns those that were refused, with the reason. Raises `GivenUp`."""
    refused: dict[str, str] = {}
    waiting = iter(paths)

    async def work(bar: tqdm[Any]) -> None:
        for path in waiting:  # each worker takes the next one
            try:
                line = await embedder.embed(folder, path)
            except (Refused, OSError) as error:  # the latter from reading the image
                refused[path] = str(error)
            else:
                output.add(line)
            bar.update()

    with tqdm(total=len(paths), unit="image", smoothing=0.05) as bar:
        workers = [asyncio.create_task(work(bar)) for _ in range(min(concurrency, len(paths)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
    return refused


def find_images(folder: Path) -> Iterator[str]:
    """Paths of the images in the folder and below, in order. Raises `Unusable`."""
    try:
        os.listdir(folder)
    except OSError as error:
        raise Unusable(f"{folder} cannot be read: {error.strerror}") from None
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in SUFFIXES and path.is_file():
            yield path.relative_to(folder).as_posix()


async def run(options: argparse.Namespace) -> int:
    key = os.environ.get("SIDECAR_API_KEY")
    paths = list(find_images(options.folder))  # before the file is made
    output = Output(options.output)
    missing = [path for path in paths if path not in output.paths]
    sys.stderr.write(f"{len(output.paths)} images are in {options.output}, {len(missing)} are missing\n")
    try:
        async with httpx.AsyncClient(
            base_url=options.sidecar,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=60,
            limits=httpx.Limits(max_connections=options.concurrency),
        ) as client:
            embedder = Embedder(client, options.patience_s)
            refused = await embed_all(options.folder, missing, output, embedder, options.concurrency)
    finally:
        output.close()
    for path, reason in sorted(refused.items()):
        sys.stderr.write(f"{path}: {reason}\n")
    return 1 if refused else 0


def count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("it must be at least 1")
    return int(text)


def main() -> int:
    assert __doc__ is not None, "python -OO strips the text for --help"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--sidecar", default="http://127.0.0.1:8080", metavar="URL")
    parser.add_argument("--concurrency", type=count, default=16, help="requests at once [16]")
    parser.add_argument("--patience-s", type=float, default=300, help="how long to wait for a server [300]")
    options = parser.parse_args()
    try:
        return asyncio.run(run(options))
    except GivenUp as error:
        sys.stderr.write(f"{error}\nRun it again to go on.\n")
        return 1
    except Unusable as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except OSError as error:  # a full disk
        sys.stderr.write(f"{error}\nRun it again to go on.\n")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

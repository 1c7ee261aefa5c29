"""Embeds every image of a folder into one file. Run it again after an interruption: it continues.

    python embed_folder.py photos/ photos.jsonl

Needs httpx and tqdm. The file has one line for each image: {"path", "sha256", "fingerprint", "embedding"}.
The embedding is base64 of float32, little-endian: numpy.frombuffer(base64.b64decode(text), "<f4") reads it.
An image that is in the file already is not sent again, so the same command also adds new images.

While the server is full, restarts or cannot be reached, the program waits. At the end it lists the images
that the server refused, and exits with 1 if there are any. It exits with 2 if the folder cannot be read or
the file cannot be used.
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
from urllib.parse import urlsplit

try:
    import httpx
    from tqdm import tqdm
except ImportError as error:
    sys.exit(
        f"{error.name} is not installed for {sys.executable}. "
        "Use the Python of the project, .venv/bin/python, or run: pip install httpx tqdm"
    )

SUFFIXES = frozenset([".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif"])
# The server is full or restarts, or a proxy cannot reach it.
TRY_AGAIN = frozenset({408, 429, 502, 503, 504})
LONGEST_PAUSE_S = 10.0
LINE_START = b'{"path": "'  # every line starts like this


class Refused(Exception):
    """The server refuses this image, and would refuse it again."""


class GivenUp(Exception):
    """No image can be embedded: the server is away for too long, refuses all, or serves another model."""


class Unusable(Exception):
    """The folder cannot be read, or the file cannot be used."""


@dataclass(frozen=True)
class Line:
    """One line of the file."""

    path: str  # relative to the folder, with slashes
    sha256: str
    fingerprint: str
    embedding: str  # base64 of little-endian float32


class Output:
    """The file, with its lines from earlier runs. Only one process may use it at a time."""

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
            raise Unusable(f"{path} was not written by this program") from None

    def _read(self) -> None:
        """Reads the lines and removes an incomplete last line. Raises `TypeError` or `ValueError`."""
        self._file.seek(0)
        end = 0
        for line in self._file:
            if line.endswith(b"\n"):
                self._remember(Line(**json.loads(line)))
                end += len(line)
            elif line[: len(LINE_START)] != LINE_START[: len(line)]:
                raise ValueError("the last line is incomplete, and not from this program")
        self._file.truncate(end)

    def _remember(self, line: Line) -> None:
        if self._fingerprint not in (None, line.fingerprint):
            raise GivenUp(
                "the server's fingerprint is not that of the file, so their vectors cannot be compared"
            )
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
    """Sends images to the server. Repeats a request if the server may accept it later."""

    client: httpx.AsyncClient
    patience_s: float  # how long to repeat the request for one image, from the first failure on

    async def embed(self, folder: Path, path: str) -> Line:
        """The line for one image. Raises `Refused`, `GivenUp`, `OSError`."""
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
    """Seconds to wait: what the server asks for, or else twice as long after each attempt.

    A random part keeps the requests from coming back all at once.
    """
    asked = answer.headers.get("Retry-After", "") if answer is not None else ""
    pause = float(asked) if asked.isdecimal() else min(LONGEST_PAUSE_S, 0.25 * 2 ** min(attempt, 10))
    return pause * (1 + 0.25 * random.random())


def _read_answer(path: str, answer: httpx.Response) -> Line:
    if answer.status_code in (401, 403, 404):  # the same for every image
        raise GivenUp(f"{answer.status_code} {answer.text[:200]}")
    if answer.is_error:
        raise Refused(f"{answer.status_code} {answer.text[:200]}")
    try:
        body: dict[str, Any] = answer.json()
        [image] = body["data"]
        return Line(path, image["sha256"], body["fingerprint"], image["embedding"])
    except (ValueError, LookupError, TypeError):
        raise GivenUp(f"{answer.request.url} is not vision-sidecar: {answer.text[:200]!r}") from None


async def embed_all(
    folder: Path, paths: list[str], output: Output, embedder: Embedder, concurrency: int
) -> dict[str, str]:
    """Embeds all images. Returns the reason for each that was refused. Raises `GivenUp`."""
    refused: dict[str, str] = {}
    remaining = iter(paths)

    async def work(bar: tqdm[Any]) -> None:
        for path in remaining:  # each worker takes the next path
            try:
                line = await embedder.embed(folder, path)
            except (Refused, OSError) as error:  # OSError: the image cannot be read
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
    """Paths of the images in the folder and its subfolders, sorted. Raises `Unusable`."""
    try:
        os.listdir(folder)
    except OSError as error:
        raise Unusable(f"{folder} cannot be read: {error.strerror}") from None
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in SUFFIXES and path.is_file():
            yield path.relative_to(folder).as_posix()


async def run(options: argparse.Namespace) -> int:
    key = os.environ.get("SIDECAR_API_KEY")
    paths = list(find_images(options.folder))  # before the file is created
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


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def server_url(text: str) -> str:
    if urlsplit(text).scheme not in ("http", "https"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL such as http://127.0.0.1:8080")
    return text


def main() -> int:
    assert __doc__ is not None, "python -OO strips the text for --help"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--sidecar", type=server_url, default="http://127.0.0.1:8080", metavar="URL")
    parser.add_argument("--concurrency", type=positive, default=16, help="requests at the same time [16]")
    parser.add_argument(
        "--patience-s", type=float, default=300, help="how long to wait for the server, in seconds [300]"
    )
    options = parser.parse_args()
    try:
        return asyncio.run(run(options))
    except GivenUp as error:
        sys.stderr.write(f"{error}\nRun it again to continue.\n")
        return 1
    except Unusable as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except OSError as error:  # a full disk
        sys.stderr.write(f"{error}\nRun it again to continue.\n")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

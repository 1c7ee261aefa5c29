"""Measures a running server under load. Separate processes send the load.

Open loop (`--rate`): Poisson arrivals, independent of the server; latency counts from when a request was due.
Closed loop (`--concurrency`): each caller sends again as soon as it has an answer, also after a refusal.
Ctrl-C stops the load and prints the results so far.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from service.bench.fleet import Fleet, FleetError
from service.bench.load import Share, Span
from service.bench.load_report import Memory, format_report, summarize
from service.bench.photos import Target, make_photos, name_refused, read_photos, write_requests
from service.bench.scrape import Server, Snapshot, growth

INTERRUPTED = 130  # exit code after Ctrl-C
_MAX_SIDE = 8192
_SAMPLE_S = 1.0  # between two readings of the server's memory


class UsageError(Exception):
    """Flags that cannot be used together. The message is one line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench serve`."""
    add = parser.add_argument
    add("--url", type=_url, default="http://127.0.0.1:8080", help="URL of the server [http://127.0.0.1:8080]")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--rate", type=_positive_float, help="open loop: requests per second")
    load.add_argument("--concurrency", type=_positive, default=8, help="closed loop: number of callers [8]")
    processes = min(max((os.cpu_count() or 1) // 4, 1), 4)
    add("--processes", type=_positive, default=processes, help=f"processes that send the load [{processes}]")
    add("--duration", type=_positive_float, default=10.0, help="measured time in seconds [10]")
    add("--warmup", type=_seconds, default=2.0, help="load before the measured time, in seconds [2]")
    add("--timeout", type=_positive_float, default=60.0, help="longest wait for an answer, in seconds [60]")
    add("--images", type=Path, help="folder with images to send [images are made]")
    add("--size", type=_size, help="size of the made images, WIDTHxHEIGHT [336x336]")
    add("--format", choices=("jpeg", "png"), help="format of the made images [jpeg]")
    add(
        "--images-per-request",
        type=_positive,
        default=1,
        help="images in each request; several are sent as a form [1]",
    )
    add(
        "--repeat-images",
        action="store_true",
        help="send the same files again and again, which a server with a cache does not encode again "
        "[each image that is sent has bytes of its own]",
    )
    add(
        "--read-tokens",
        type=Path,
        metavar="DIR",
        help="with --query format=handoff: read each image's tokens from the server's --handoff-dir",
    )
    add(
        "--chat",
        type=_visible,
        metavar="MODEL",
        help="send chats that ask this model for one token to /v1/chat/completions, in place of /embed; "
        "the server may also be an LLM server alone",
    )
    add("--query", type=_query, help="options of each request, such as pooling=none&dtype=float16")
    add("--api-key", type=_visible, help="API key that is sent with each request")
    add("--seed", type=int, default=0, help="seed of arrivals and made images [0]")
    add("--json", type=Path, help="also write the results to this file")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value


def _size(text: str) -> tuple[int, int]:
    width, height = (int(side) for side in text.split("x"))
    if not (1 <= width <= _MAX_SIDE and 1 <= height <= _MAX_SIDE):
        raise argparse.ArgumentTypeError(f"sides must be from 1 to {_MAX_SIDE}")
    return width, height


def _visible(text: str) -> str:
    if not text or not all("!" <= char <= "~" for char in text):
        raise argparse.ArgumentTypeError("must be visible ASCII characters")
    return text


def _query(text: str) -> str:
    return _visible(text.removeprefix("?"))


def _url(text: str) -> str:
    parts = urlsplit(_visible(text))
    # `port` raises `ValueError` if it is not a number.
    if parts.scheme != "http" or not parts.hostname or parts.port == 0 or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError("must be a URL such as http://127.0.0.1:8080")
    return text.rstrip("/")


@dataclass(frozen=True)
class Watched:
    """The server while it was under load."""

    end: float  # of the measured time, as `time.monotonic`
    is_interrupted: bool
    before: Snapshot | None
    after: Snapshot | None
    memory: Memory


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints. Returns the exit code."""
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # before the load began
        return INTERRUPTED


def _run(arguments: argparse.Namespace) -> int:
    try:
        host, port = _find_address(arguments.url)
        server = Server(host, port, urlsplit(arguments.url).path)
        server.snapshot()
    except OSError as error:
        return _complain(f"{arguments.url} does not answer: {error.strerror or error}")
    try:
        photos = _photos(arguments)
        report = (Path(os.devnull) if arguments.json is None else arguments.json).open("w")
    except (OSError, UsageError) as error:
        return _complain(str(error))
    parts = urlsplit(arguments.url)
    route = "/embed" if arguments.chat is None else "/v1/chat/completions"
    path = parts.path + route + (f"?{arguments.query}" if arguments.query else "")
    target = Target(parts.netloc.rpartition("@")[2], path, arguments.api_key, arguments.chat)
    with report, tempfile.NamedTemporaryFile(prefix="vision-sidecar-bench-") as file:
        spans = write_requests(
            target,
            list(photos.values()),
            arguments.images_per_request,
            file,
            stamped=not arguments.repeat_images,
        )
        shares = _shares(arguments, host, port, Path(file.name), spans)
        return _measure(arguments, server, shares, list(photos), report)


def _complain(text: str) -> int:
    sys.stderr.write(f"vision-sidecar bench: {text}\n")
    return 2


def _find_address(url: str) -> tuple[str, int]:
    """The first address of the server that takes a connection. Raises `OSError`."""
    parts = urlsplit(url)
    assert parts.hostname, "a URL without a host"
    with socket.create_connection((parts.hostname, parts.port or 80), timeout=5) as connection:
        host, port = connection.getpeername()[:2]
    return host, port


def _photos(arguments: argparse.Namespace) -> dict[str, bytes]:
    if arguments.images is None:
        width, height = arguments.size or (336, 336)
        return make_photos(width, height, arguments.format or "jpeg", arguments.seed)
    if arguments.size or arguments.format:
        raise UsageError("--size and --format are for made images, not for --images")
    return read_photos(arguments.images)


def _shares(
    arguments: argparse.Namespace, host: str, port: int, requests: Path, spans: list[Span]
) -> list[Share]:
    """Divides the load into equal shares. Each process starts with a different request."""
    is_open = arguments.rate is not None
    count = arguments.processes if is_open else min(arguments.processes, arguments.concurrency)
    shares = []
    run = secrets.token_hex(6)
    for index in range(count):
        shares.append(
            Share(
                host=host,
                port=port,
                requests=requests,
                spans=tuple(spans),
                first=index * len(spans) // count,
                rate=arguments.rate / count if is_open else None,
                concurrency=arguments.concurrency // count + (index < arguments.concurrency % count),
                total_s=arguments.warmup + arguments.duration,
                timeout_s=arguments.timeout,
                seed=f"{arguments.seed}/{index}",
                run=f"{run}{index:03x}",
                tokens_dir=None if arguments.read_tokens is None else str(arguments.read_tokens),
            )
        )
    return shares


def _measure(
    arguments: argparse.Namespace, server: Server, shares: list[Share], names: list[str], report: IO[str]
) -> int:
    try:
        with Fleet(shares) as fleet:
            begin = fleet.start()
            start, end = begin + arguments.warmup, begin + arguments.warmup + arguments.duration
            watched = watch(server, start, end, fleet.wait, fleet.stop)
            notes = fleet.collect()
    except FleetError as error:
        sys.stderr.write(f"vision-sidecar bench: {error}\n")
        return 1
    load = summarize(notes, start - begin, watched.end - begin, arguments.images_per_request)
    grown = growth(watched.before, watched.after) if watched.before and watched.after else None
    is_open = arguments.rate is not None
    shape = f"open loop, {arguments.rate:g}/s" if is_open else f"closed loop, {arguments.concurrency} callers"
    sys.stdout.write(f"{arguments.url}: {shape}, processes: {len(shares)}\n")
    errors = {key: code for each in notes for key, code in each.refused.items()}
    refused = name_refused(names, arguments.images_per_request, errors)
    sys.stdout.write(format_report(load, is_open, grown, watched.memory, refused))
    content = {
        # Users may show the report to others, so it has no key.
        "arguments": {name: str(value) for name, value in vars(arguments).items() if name != "api_key"},
        "processes": len(shares),
        "load": asdict(load),
        "refused_images": refused,
        "server": grown and asdict(grown),
        "memory": asdict(watched.memory),
    }
    json.dump(content, report, indent=1)
    return INTERRUPTED if watched.is_interrupted else 0


def watch(
    server: Server, start: float, end: float, wait_for_load: Callable[[], object], stop: Callable[[], object]
) -> Watched:
    """Reads the metrics from `start` to `end`, then waits for the last answers. Ctrl-C stops the load."""
    before = after = None
    samples: list[float] = []
    is_interrupted = False
    try:
        time.sleep(max(start - time.monotonic(), 0))
        before = _snapshot(server)
        while time.monotonic() < end:
            samples += server.memory_bytes()
            time.sleep(min(_SAMPLE_S, max(end - time.monotonic(), 0)))
        samples += server.memory_bytes()
        after = _snapshot(server)
        wait_for_load()
    except KeyboardInterrupt:
        is_interrupted = True
        stop()
        end = min(end, time.monotonic())
        after = after or _snapshot(server)
    memory = Memory(*(samples[0], samples[-1], max(samples)) if samples else (None, None, None))
    return Watched(max(start, end), is_interrupted, before, after, memory)


def _snapshot(server: Server) -> Snapshot | None:
    try:
        return server.snapshot()
    except OSError:
        return None

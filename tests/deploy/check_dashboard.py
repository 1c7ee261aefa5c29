"""Runs every query of the dashboard and the alerts in a Prometheus that scrapes a real server under traffic.

`make check-deploy` runs it. pytest does not, because it needs the `prometheus` binary. CUDA graphs run only
on GPUs, so a second target has their metrics with made-up numbers.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, start_http_server

from models import BatchStats
from service.metrics import Metrics
from tests.support.app import encode_image
from tests.support.process import Process
from tests.support.project import ROOT, read_dashboard

TRAFFIC_S = 25
BUDGET = 128


def main() -> int:
    """Returns 1 if a query fails or has no data, else 0."""
    server = Process("--port", "0", "--device", "cpu").ready()
    try:
        with made_up_graphs() as graphs, prometheus(server.url.removeprefix("http://"), graphs) as url:
            send_requests(server.url)
            problems = [*panels_without_data(url), *unhealthy_rules(url)]
    finally:
        server.kill()
    sys.stdout.writelines(f"{problem}\n" for problem in problems or ["every query has data"])
    return 1 if problems else 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def made_up_graphs() -> Iterator[str]:
    """Serves the metrics of a device with CUDA graphs. Yields the address."""
    registry = CollectorRegistry()
    metrics = Metrics(registry, ("/embed",))
    metrics.add_device("cuda:0")
    metrics.set_graphs("cuda:0", [BUDGET], memory_bytes=2**30, capture_seconds=10.0)
    stats = BatchStats(
        device="cuda:0",
        num_images=1,
        num_tokens=100,
        hits=1,
        misses={},
        replays={BUDGET: 1},
        padding_tokens=28,
        busy_s=0.1,
    )
    stop = threading.Event()

    def count() -> None:
        while not stop.wait(0.5):
            metrics.observe_batch(stats)

    port = free_port()
    http, thread = start_http_server(port, "127.0.0.1", registry)
    counting = threading.Thread(target=count)
    counting.start()
    yield f"127.0.0.1:{port}"
    stop.set()
    counting.join()
    http.shutdown()
    thread.join()


@contextmanager
def prometheus(*targets: str) -> Iterator[str]:
    """Runs Prometheus with our configuration and these targets. Yields its URL."""
    config = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
    quoted = ", ".join(f'"{target}"' for target in targets)
    config = config.replace('"sidecar:8080"', quoted).replace("scrape_interval: 5s", "scrape_interval: 1s")
    config = config.replace("alerts.yml", str(ROOT / "deploy/prometheus/alerts.yml"))
    url = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prometheus.yml"
        file.write_text(config)
        flags = [f"--config.file={file}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={url}"]
        process = subprocess.Popen(["prometheus", *flags, "--log.level=error"])
        try:
            yield f"http://{url}"
        finally:
            process.terminate()
            process.wait(timeout=30)


def send_requests(url: str) -> None:
    images = [encode_image(64 * n, 64, format="JPEG", seed=n) for n in range(1, 6)]
    ends = time.monotonic() + TRAFFIC_S
    with httpx.Client(base_url=url, headers={"Content-Type": "image/jpeg"}, timeout=30) as client:
        while time.monotonic() < ends:
            for image in (*images, b"no image"):
                client.post("/embed", content=image)
            time.sleep(0.2)


def ask(url: str, expression: str) -> list[Any]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", (expression, answer)
    result: list[Any] = answer["data"]["result"]
    return result


def filled_in(expression: str) -> str:
    """The expression as Grafana sends it for all servers."""
    return expression.replace("$instance", ".*").replace("$__rate_interval", "20s")


def panels_without_data(url: str) -> Iterator[str]:
    for panel in read_dashboard()["panels"]:
        for target in panel.get("targets", ()):
            values = [series["value"][1] for series in ask(url, filled_in(target["expr"]))]
            if not any(re.match(r"[-\d]|\+?Inf", value) for value in values):
                yield f"no data: {panel['title']}: {target['expr']}"
    for note in read_dashboard()["annotations"]["list"]:
        ask(url, filled_in(note["expr"]))  # may have no data


def unhealthy_rules(url: str) -> Iterator[str]:
    for group in httpx.get(f"{url}/api/v1/rules").json()["data"]["groups"]:
        for rule in group["rules"]:
            if rule["health"] != "ok":
                yield f"{rule['health']}: {rule['name']} {rule.get('lastError', '')}"


if __name__ == "__main__":
    sys.exit(main())

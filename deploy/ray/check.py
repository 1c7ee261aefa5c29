"""Runs deploy/ray/demo.yaml on this machine and looks whether it serves, scales, restarts and loses nothing.

`make check-ray`, or any Python with the extra `ray`. Takes about three minutes. Refuses to start where a Ray
runs already, as in the end it stops all that there are.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
SERVER = "http://127.0.0.1:8000"
APPLICATIONS = "http://127.0.0.1:8265/api/serve/applications/"
CALLERS = 16
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main() -> int:
    for port in (6379, 8000, 8265):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return say(f"port {port} is in use; is a Ray running already?", 2)
    config = yaml.safe_load((ROOT / "deploy/ray/demo.yaml").read_text())
    with tempfile.TemporaryDirectory(prefix="check-ray-") as folder, running_ray():
        path = Path(folder) / "serve.yaml"
        deploy(config, path)
        wait_for("one replica", lambda: len(pids()) == 1)
        check("scaling up under load", 0, load(Path(folder), 45, lambda: wait_for("a second replica", two)))
        check_metrics()
        check("killing a replica", CALLERS, load(Path(folder), 30, kill_one))
        wait_for("two replicas again", two)
        check("rolling out another configuration", 0, load(Path(folder), 60, lambda: redeploy(config, path)))
        return say("all is well", 0)


def say(text: str, code: int) -> int:
    sys.stdout.write(f"{time.strftime('%T')} {text}\n")
    sys.stdout.flush()
    return code


def command(*words: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(words, env=environ, cwd=ROOT, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


@contextmanager
def running_ray() -> Iterator[None]:
    try:
        # More CPUs than there may be: a replica and the tasks that start it share them.
        command(str(BIN / "ray"), "start", "--head", "--node-ip-address=127.0.0.1", "--num-cpus=4")
        yield
    finally:
        command(str(BIN / "ray"), "stop", "--force")


def deploy(config: dict[str, Any], path: Path) -> None:
    path.write_text(yaml.safe_dump(config))
    command(str(BIN / "serve"), "deploy", str(path))
    wait_for("the application", lambda: application()["status"] == "RUNNING")


def redeploy(config: dict[str, Any], path: Path) -> None:
    before = pids()
    config["applications"][0]["runtime_env"]["env_vars"]["VISION_SIDECAR_LOG_LEVEL"] = "warning"
    deploy(config, path)
    wait_for("replicas that are all new", lambda: two() and not pids() & before)


def get(url: str) -> Any:
    with OPENER.open(url, timeout=10) as answer:
        return answer.read().decode()


def application() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(get(APPLICATIONS))["applications"]["vision-sidecar"]
    return found


def pids() -> set[int]:
    """Processes of the replicas that take requests."""
    replicas = application()["deployments"]["VisionSidecar"]["replicas"]
    return {replica["pid"] for replica in replicas if replica["state"] == "RUNNING"}


def two() -> bool:
    return len(pids()) == 2


def wait_for(what: str, is_there: Callable[[], bool], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_there():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not seen within {timeout_s:g} s")
        time.sleep(0.2)
    say(f"seen: {what}", 0)


def kill_one() -> None:
    time.sleep(8)
    victim = min(pids())
    os.kill(victim, signal.SIGKILL)
    say(f"killed process {victim}", 0)


def load(folder: Path, duration_s: float, meanwhile: Callable[[], None]) -> dict[str, Any]:
    """The report of `bench serve`, of which something happened in the middle."""
    report = folder / "report.json"
    words = ["-m", "service", "bench", "serve", f"--url={SERVER}", f"--concurrency={CALLERS}"]
    words += [f"--duration={duration_s}", f"--json={report}"]
    bench = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        meanwhile()
        if bench.poll() is not None:
            raise SystemExit("it took longer than the load")
        bench.wait()
    finally:
        bench.kill()
        bench.wait()
    found: dict[str, Any] = json.loads(report.read_text())["load"]
    return found


def check(what: str, max_errors: int, report: dict[str, Any]) -> None:
    """All requests have an answer, and at most so many another than 200."""
    errors = sum(count for status, count in report["statuses"].items() if status != "200")
    latency = report["latency_ms"]
    say(
        f"{what}: requests {report['requests']}, answers {report['statuses']}, no answer "
        f"{report['connection_errors']}, unfinished {report['unfinished']}, {report['ok_per_s']:.1f}/s, "
        f"P50 {latency['p50']:.0f} ms, P99 {latency['p99']:.0f} ms",
        0,
    )
    if errors > max_errors or report["connection_errors"] or report["unfinished"]:
        raise SystemExit(f"{what}: lost requests")


def check_metrics() -> None:
    """Each replica is a target, with metrics of its own."""
    targets = json.loads(get(f"{SERVER}/metrics/targets"))
    pages = [get(f"http://{target['targets'][0]}/metrics") for target in targets]
    ready = ["\nvision_sidecar_ready 1.0\n" in page for page in pages]
    say(f"targets: {targets}", 0)
    if ready != [True, True] or len(set(pages)) != 2:
        raise SystemExit("metrics: two replicas are two targets that are ready")


if __name__ == "__main__":
    sys.exit(main())

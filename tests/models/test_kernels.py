"""The condition for fused kernels. tests/gpu tests the kernels themselves."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from models import kernels


def test_folder_named_triton_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triton").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert runpy.run_path(kernels.__file__)["HAS_TRITON"] == kernels.HAS_TRITON

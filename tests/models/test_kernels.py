"""When kernels can be fused. What they compute: tests/gpu."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from models import kernels


def test_a_folder_that_happens_to_be_called_triton_is_not_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "triton").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert runpy.run_path(kernels.__file__)["HAS_TRITON"] == kernels.HAS_TRITON

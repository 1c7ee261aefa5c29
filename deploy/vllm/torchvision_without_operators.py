"""Lets torchvision be imported beside a torch that it was not built for, such as PyPI's beside a CPU build.

Its operators cannot be loaded then. That is no error by itself, but torchvision describes the outputs of two
of them while it is imported, and these two must exist. vLLM only needs what torchvision has in Python.

A .pth file imports this module at the start of every Python in the environment. When torchvision is first
imported, this module declares the two operators.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[Any] = []  # an operator lives as long as its library


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _declare()
        return None


def _declare() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in _OPERATORS:
        library.define(operator)
    _libraries.append(library)


sys.meta_path.insert(0, _BeforeTorchvision())

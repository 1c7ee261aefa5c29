"""API servers and a device that are connected as in several processes."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

from tests.support.processes import Company

MakeCompany = Callable[..., Company]


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))

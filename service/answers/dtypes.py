"""The dtypes of embeddings, under the names that requests, settings and answers use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

DtypeName = Literal["float32", "float16", "bfloat16"]
TORCH_DTYPES: Mapping[DtypeName, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


_NAMES: Mapping[torch.dtype, DtypeName] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> DtypeName:
    """`float32` for `torch.float32`."""
    return _NAMES[dtype]

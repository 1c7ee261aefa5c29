"""Patches of random images."""

from __future__ import annotations

import torch

from models import Patches


def patches(*grids: tuple[int, int]) -> list[Patches]:
    generator = torch.Generator().manual_seed(sum(h * w for h, w in grids))
    return [
        Patches(
            torch.randint(0, 256, (h * w, 768), dtype=torch.uint8, generator=generator),
            (1, h, w),
            h * w // 4,
        )
        for h, w in grids
    ]


MIXED = [(20, 20), (24, 32), (32, 32), (64, 64), (16, 16), (48, 48), (2, 398), (40, 40)]

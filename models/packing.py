"""Greedy packing of images into token budgets: a pure function over integers.

The design is that of vLLM's encoder CUDA graphs (pull request 35963). Knows nothing of tensors, graphs or
images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """How one batch runs. Images are given by their indices in the batch."""

    replays: tuple[tuple[int, tuple[int, ...]], ...]  # sub-batches: the budget to replay, and its images
    oversize: tuple[int, ...]  # images larger than every budget, which run eagerly


def plan(num_tokens: Sequence[int], slots: Mapping[int, int]) -> Plan:
    """Packs images greedily, smallest first, into sub-batches of at most the largest budget.

    `num_tokens` has the output tokens of each image. `slots` maps each budget, in ascending order, to the
    number of images that it takes. An image joins the current sub-batch if tokens and images stay within the
    limits of the largest budget.
    """
    largest = max(slots)
    max_images = slots[largest]
    order = sorted(range(len(num_tokens)), key=num_tokens.__getitem__)
    oversize = tuple(index for index in order if num_tokens[index] > largest)
    packs: list[list[int]] = []
    used = 0
    for index in order[: len(order) - len(oversize)]:
        if not packs or used + num_tokens[index] > largest or len(packs[-1]) == max_images:
            packs.append([])
            used = 0
        packs[-1].append(index)
        used += num_tokens[index]
    return Plan(tuple((_fit(pack, num_tokens, slots), tuple(pack)) for pack in packs), oversize)


def _fit(pack: Sequence[int], num_tokens: Sequence[int], slots: Mapping[int, int]) -> int:
    """Returns the smallest budget that takes the tokens and the number of these images."""
    total = sum(num_tokens[index] for index in pack)
    return next(budget for budget, max_images in slots.items() if total <= budget and len(pack) <= max_images)

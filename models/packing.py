"""Token budgets, greedy packing and load balance: pure functions over integers.

The design is that of vLLM's encoder CUDA graphs (pull request 35963). A budget counts output tokens, after
the spatial merge. Knows nothing of tensors, graphs or images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

_SAME_KERNELS_FROM = 4096  # tokens


class BudgetError(ValueError):
    """Settings of budgets that contradict each other or the model."""


@dataclass(frozen=True)
class Plan:
    """How one batch runs: `replays` are (budget, indices of images), `oversize` runs eagerly."""

    replays: tuple[tuple[int, tuple[int, ...]], ...]
    oversize: tuple[int, ...]


def infer_budgets(smallest: int, largest: int, steps_per_octave: int) -> tuple[int, ...]:
    """Budgets from the model's smallest image to `largest`, ascending, `largest` always among them.

    Each octave is cut into that many equal steps; 1 gives the published powers of two times `smallest`.
    """
    if smallest < 1 or largest < smallest:
        raise BudgetError(f"budgets from {smallest} to {largest} tokens are empty")
    if steps_per_octave < 1:
        raise BudgetError(f"steps per octave must be 1 or more, not {steps_per_octave}")
    budgets = {largest}
    octave = smallest
    while octave < largest:
        steps = (octave + octave * step // steps_per_octave for step in range(steps_per_octave))
        budgets.update(budget for budget in steps if budget < largest)
        octave *= 2
    return tuple(sorted(budgets))


def infer_warm_up(smallest: int, largest: int, above: int) -> tuple[int, ...]:
    """Sizes of images to run eagerly once, so that all kernels are compiled for those over `above` tokens.

    Kernels are chosen by size, some for less than an octave, and none from `_SAME_KERNELS_FROM` tokens on.
    """
    last = min(largest, max(smallest, _SAME_KERNELS_FROM))
    sizes = infer_budgets(smallest, last, steps_per_octave=4)
    return tuple(size for size in sizes if size > above)


def check_budgets(budgets: Sequence[int], smallest: int) -> tuple[int, ...]:
    """Explicit budgets, ascending. Raises `BudgetError` where they cannot serve."""
    if not budgets:
        raise BudgetError("no token budget is given")
    ascending = tuple(sorted(set(budgets)))
    if len(ascending) != len(budgets):
        raise BudgetError(f"token budgets {list(budgets)} hold one twice")
    if ascending[0] < smallest:
        raise BudgetError(
            f"token budget {ascending[0]} is under the model's smallest image, {smallest} tokens"
        )
    return ascending


def infer_max_images(budgets: Sequence[int], smallest_image: int) -> int:
    """The largest budget over the model's smallest image, never more than the smallest budget."""
    return max(1, min(max(budgets) // smallest_image, min(budgets)))


def check_max_images(max_images: int, budgets: Sequence[int], smallest_image: int) -> int:
    """An explicit limit on images. Raises `BudgetError` where it contradicts the budgets."""
    if not 1 <= max_images <= min(budgets):
        raise BudgetError(
            f"images per batch must be 1 to the smallest budget, {min(budgets)}, not {max_images}"
        )
    if max_images * smallest_image > max(budgets):
        raise BudgetError(
            f"{max_images} images per batch never fit the largest budget of {max(budgets)} tokens: "
            f"the model's smallest image has {smallest_image}"
        )
    return max_images


def plan(num_tokens: Sequence[int], slots: Mapping[int, int]) -> Plan:
    """Packs images greedily, smallest first, into sub-batches of the largest budget at most.

    `num_tokens` are the output tokens of each image; `slots` says for each budget, ascending, how many images
    it takes. An image joins the sub-batch while tokens and count stay within the largest budget's limits; one
    larger than every budget is oversize.
    """
    largest = max(slots)
    most = slots[largest]
    order = sorted(range(len(num_tokens)), key=num_tokens.__getitem__)
    oversize = tuple(index for index in order if num_tokens[index] > largest)
    packs: list[list[int]] = []
    used = 0
    for index in order[: len(order) - len(oversize)]:
        if not packs or used + num_tokens[index] > largest or len(packs[-1]) == most:
            packs.append([])
            used = 0
        packs[-1].append(index)
        used += num_tokens[index]
    return Plan(tuple((_fit(pack, num_tokens, slots), tuple(pack)) for pack in packs), oversize)


def _fit(pack: Sequence[int], num_tokens: Sequence[int], slots: Mapping[int, int]) -> int:
    """The smallest budget that holds the tokens and the number of those images."""
    total = sum(num_tokens[index] for index in pack)
    return next(budget for budget, most in slots.items() if total <= budget and len(pack) <= most)


def get_load_balance_assignment(
    sizes: Sequence[int], num_replicas: int, loads: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Indices for each replica, so that the sums of their sizes are near each other; a share may be empty.

    Largest first to the least loaded, as vLLM's function of this name does. `loads` is what each replica has
    to do already.
    """
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    heap = [(load, replica) for replica, load in enumerate(loads or [0] * num_replicas)]
    heapify(heap)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, replica = heap[0]
        shares[replica].append(index)
        heapreplace(heap, (load + sizes[index], replica))
    return tuple(tuple(sorted(share)) for share in shares)

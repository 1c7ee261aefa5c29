"""Token budgets, greedy packing and load balance: pure functions over integers.

The design is that of vLLM's encoder CUDA graphs (pull request 35963). A budget counts output tokens, after
the spatial merge. Knows nothing of tensors, graphs or images.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace


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


def smallest_fitting_budget(num_tokens: int, budgets: Sequence[int]) -> int | None:
    """The smallest of the ascending budgets that holds that many tokens, or None."""
    place = bisect_left(budgets, num_tokens)
    return budgets[place] if place < len(budgets) else None


def plan(num_tokens: Sequence[int], budgets: Sequence[int], max_images: int) -> Plan:
    """Packs images greedily, smallest first, into sub-batches of the largest budget at most.

    `num_tokens` are the output tokens of each image, `budgets` ascending. An image joins the sub-batch while
    tokens and count stay within the limits; one larger than every budget is oversize.
    """
    largest = budgets[-1]
    order = sorted(range(len(num_tokens)), key=num_tokens.__getitem__)
    oversize = tuple(index for index in order if num_tokens[index] > largest)
    replays: list[tuple[int, tuple[int, ...]]] = []
    pack: list[int] = []
    used = 0

    def close() -> None:
        budget = smallest_fitting_budget(used, budgets)
        assert budget is not None, "a sub-batch never exceeds the largest budget"
        replays.append((budget, tuple(pack)))

    for index in order[: len(order) - len(oversize)]:
        if pack and (used + num_tokens[index] > largest or len(pack) == max_images):
            close()
            pack, used = [], 0
        pack.append(index)
        used += num_tokens[index]
    if pack:
        close()
    return Plan(tuple(replays), oversize)


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

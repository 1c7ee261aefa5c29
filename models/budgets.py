"""Token budgets of encoder CUDA graphs: pure functions over integers.

A budget counts output tokens, after the spatial merge. The design is that of vLLM's encoder CUDA graphs (pull
request 35963). Knows nothing of tensors, graphs or images.
"""

from __future__ import annotations

from collections.abc import Sequence

_SAME_KERNELS_FROM = 4096  # tokens; all larger images run the same kernels


class BudgetError(ValueError):
    """Budget settings that contradict each other or the model."""


def infer_budgets(smallest: int, largest: int, steps_per_octave: int) -> tuple[int, ...]:
    """Returns ascending budgets from `smallest` to `largest` tokens, both included.

    Each octave is divided into `steps_per_octave` equal steps. With 1 step the budgets are `smallest` times
    the powers of two, as published.
    """
    if smallest < 1 or largest < smallest:
        raise BudgetError(f"there is no budget between {smallest} and {largest} tokens")
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
    """Returns the sizes, in tokens, of images to run eagerly at start: all kernels for images over `above`
    tokens are compiled then.

    Kernels are chosen by image size, some for a range smaller than an octave. From `_SAME_KERNELS_FROM`
    tokens on they no longer change.
    """
    last = min(largest, max(smallest, _SAME_KERNELS_FROM))
    sizes = infer_budgets(smallest, last, steps_per_octave=4)
    return tuple(size for size in sizes if size > above)


def check_budgets(budgets: Sequence[int], smallest: int) -> tuple[int, ...]:
    """Returns explicit budgets in ascending order.

    Raises `BudgetError` if there are none, if one is listed twice, or if one is under the model's smallest
    image.
    """
    if not budgets:
        raise BudgetError("no token budget is given")
    ascending = tuple(sorted(set(budgets)))
    if len(ascending) != len(budgets):
        raise BudgetError(f"token budgets {list(budgets)} list a budget twice")
    if ascending[0] < smallest:
        raise BudgetError(
            f"token budget {ascending[0]} is under the model's smallest image, {smallest} tokens"
        )
    return ascending


def num_slots(budget: int, max_images: int, smallest_image: int) -> int:
    """Returns how many images one replay of `budget` tokens takes: never more than could fit."""
    return min(max_images, budget // smallest_image)


def infer_max_images(budgets: Sequence[int], smallest_image: int) -> int:
    """Returns the largest budget over the model's smallest image, but at most the smallest budget."""
    return max(1, min(max(budgets) // smallest_image, min(budgets)))


def check_max_images(max_images: int, budgets: Sequence[int], smallest_image: int) -> int:
    """Returns an explicit limit on images. Raises `BudgetError` if it contradicts the budgets."""
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

"""Sharing the images of one call among replicas: a pure function over integers."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace


def get_load_balance_assignment(
    sizes: Sequence[int], num_replicas: int, loads: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Returns the indices of each replica's images. Their sizes add up to about the same for every replica.

    A replica may get no image.

    Each image, largest first, goes to the replica with the least load, as in vLLM's function of the same
    name. `loads` is the load that each replica already has, in the unit of `sizes`.
    """
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    heap = [(load, replica) for replica, load in enumerate(loads or [0] * num_replicas)]
    heapify(heap)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, replica = heap[0]
        shares[replica].append(index)
        heapreplace(heap, (load + sizes[index], replica))
    return tuple(tuple(sorted(share)) for share in shares)

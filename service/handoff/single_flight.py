"""Computes each result once, however many requests of this process ask for it at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SingleFlight(Generic[K, V]):
    """Used on one event loop."""

    def __init__(self) -> None:
        self._flights: dict[K, asyncio.Future[None]] = {}

    async def results(
        self,
        keys: Sequence[K],
        find: Callable[[K], V | None],
        compute: Callable[[Sequence[K]], Awaitable[Mapping[K, V]]],
    ) -> dict[K, V]:
        """The results for all keys, which may repeat. Raises the errors of `compute`.

        Keys without a result are computed. If another request computes them, its end is awaited; if that
        failed, they are computed after all. `compute` may return only a part; then it is called again.
        """
        results: dict[K, V] = {}
        while True:
            for key in dict.fromkeys(keys):
                found = None if key in results else find(key)
                if found is not None:
                    results[key] = found
            missing = [key for key in dict.fromkeys(keys) if key not in results]
            if not missing:
                return results
            own = [key for key in missing if key not in self._flights]
            if own:
                results.update(await self._compute(own, compute))
            else:
                await asyncio.wait([self._flights[key] for key in missing], return_when="FIRST_COMPLETED")

    async def _compute(
        self, keys: Sequence[K], compute: Callable[[Sequence[K]], Awaitable[Mapping[K, V]]]
    ) -> Mapping[K, V]:
        flight = asyncio.get_running_loop().create_future()
        self._flights.update(dict.fromkeys(keys, flight))
        try:
            return await compute(keys)
        finally:
            for key in keys:
                del self._flights[key]
            flight.set_result(None)

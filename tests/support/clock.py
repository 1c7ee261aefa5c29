"""An event loop whose time stands still until it is put forward, so that no test waits or is too slow."""

from __future__ import annotations

import asyncio


class SkippingLoop(asyncio.SelectorEventLoop):
    """For `asyncio.Runner`, as its `loop_factory`."""

    now = 0.0

    def time(self) -> float:
        return self.now


async def skip(seconds: float) -> None:
    """Puts the clock forward, and lets all that is due happen."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippingLoop)
    loop.now += seconds
    await settle()


async def settle() -> None:
    """Until all that can go on has done so."""
    for _ in range(10):
        await asyncio.sleep(0)

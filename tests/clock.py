"""An event loop whose clock can be put forward, so that no test waits."""

from __future__ import annotations

import asyncio


class SkippingLoop(asyncio.SelectorEventLoop):
    """For `asyncio.Runner`, as its `loop_factory`."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


async def skip(seconds: float) -> None:
    """Puts the clock forward, and lets all that is due happen."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippingLoop)
    loop.skipped_s += seconds
    await settle()


async def settle() -> None:
    """Until all that can go on has done so."""
    for _ in range(10):
        await asyncio.sleep(0)

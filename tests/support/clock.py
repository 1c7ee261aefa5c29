"""An event loop whose clock only tests move, so that tests neither wait nor depend on a fast machine."""

from __future__ import annotations

import asyncio


class SkippingLoop(asyncio.SelectorEventLoop):
    """Pass it to `asyncio.Runner` as `loop_factory`."""

    now = 0.0

    def time(self) -> float:
        return self.now


async def skip(seconds: float) -> None:
    """Moves the clock forward and runs the callbacks that have become due."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippingLoop)
    loop.now += seconds
    await settle()


async def settle() -> None:
    """Runs the loop ten times: all callbacks that are ready, and those that they schedule."""
    for _ in range(10):
        await asyncio.sleep(0)

"""Pings the other processes, and reports a process that does not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

from service.processes.supervisor.members import Member
from service.processes.wire.messages import Ping


class Watch:
    """Pings all members that are up. Calls `on_silent` for a member that has not answered for `timeout_s`."""

    def __init__(
        self,
        members: Collection[Member],
        tell: Callable[[Member, object], None],
        timeout_s: float,
        on_silent: Callable[[Member, str], None],
    ) -> None:
        self._members = members
        self._tell = tell
        self._timeout_s = timeout_s
        self._on_silent = on_silent

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self._timeout_s / 4))
            for member in self._members:
                if member.is_up and member.is_running:
                    self._ping(member)

    def _ping(self, member: Member) -> None:
        if member.pinged_at is None:
            member.pinged_at = time.monotonic()
            self._tell(member, Ping())
        elif member.silent_s > self._timeout_s:
            member.is_up = False  # it gets no more questions
            member.process.kill()  # without effect on a process that hangs in a driver
            self._on_silent(member, f"has not answered for {self._timeout_s:g} s")

from __future__ import annotations

import asyncio
import socket
import threading
from ipaddress import ip_address

import pytest

from service.fetching.dialling import SystemResolver


def test_system_resolver_returns_the_addresses_of_a_host_with_the_port() -> None:
    found = asyncio.run(SystemResolver()("127.0.0.1", 80))
    assert found == [(ip_address("127.0.0.1"), 80)]


def test_stuck_look_ups_leave_the_threads_of_the_event_loop_free(monkeypatch: pytest.MonkeyPatch) -> None:
    may_return = threading.Event()

    def stuck(*arguments: object, **options: object) -> list[object]:
        may_return.wait(20)
        return []

    async def main() -> None:
        resolver = SystemResolver()
        look_ups = [asyncio.create_task(resolver("images.test", 80)) for _ in range(50)]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(5):
                assert await asyncio.to_thread(threading.active_count) > 1
        finally:
            may_return.set()
        assert await asyncio.gather(*look_ups) == [[]] * 50

    monkeypatch.setattr(socket, "getaddrinfo", stuck)
    asyncio.run(main())

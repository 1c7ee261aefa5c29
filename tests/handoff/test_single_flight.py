"""Requests that ask for the same result at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from service.handoff.single_flight import SingleFlight


class Source:
    """Results that are computed once `go` is set, and are kept then."""

    def __init__(self) -> None:
        self.flights: SingleFlight[str, int] = SingleFlight()
        self.kept: dict[str, int] = {}
        self.computed: list[list[str]] = []
        self.go = asyncio.Event()
        self.errors: list[Exception] = []

    async def compute(self, keys: Sequence[str]) -> Mapping[str, int]:
        self.computed.append([*keys])
        await self.go.wait()
        if self.errors:
            raise self.errors.pop(0)
        self.kept |= {key: len(self.computed) for key in keys}
        return {}

    def ask(self, *keys: str) -> asyncio.Task[dict[str, int]]:
        return asyncio.create_task(self.flights.results(keys, self.kept.get, self.compute))


def test_results_are_computed_once_for_all() -> None:
    async def run() -> None:
        source = Source()
        asked = [source.ask("a", "b", "a"), source.ask("b"), source.ask("c", "a")]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert source.computed == [["a", "b"], ["c"]]
        source.go.set()
        assert await asyncio.gather(*asked) == [{"a": 2, "b": 2}, {"b": 2}, {"a": 2, "c": 2}]
        assert len(source.computed) == 2
        assert await source.ask("a", "c") == {"a": 2, "c": 2}

    asyncio.run(run())


def test_after_a_failure_the_next_request_computes_for_itself() -> None:
    async def run() -> None:
        source = Source()
        source.errors.append(ValueError("broken"))
        first, second = source.ask("a"), source.ask("a")
        await asyncio.sleep(0)
        source.go.set()
        with pytest.raises(ValueError, match="broken"):
            await first
        assert await second == {"a": 2}

    asyncio.run(run())


def test_request_that_is_cancelled_does_not_stop_the_others() -> None:
    async def run() -> None:
        source = Source()
        first, second = source.ask("a"), source.ask("a")
        await asyncio.sleep(0)
        first.cancel()
        source.go.set()
        assert await second == {"a": 2}

    asyncio.run(run())


def test_compute_is_called_again_for_what_it_left_out() -> None:
    async def run() -> None:
        kept: dict[str, int] = {}
        calls: list[list[str]] = []

        async def compute(keys: Sequence[str]) -> Mapping[str, int]:
            calls.append([*keys])
            return {keys[0]: 1}

        results = await SingleFlight[str, int]().results("abc", kept.get, compute)
        assert results == {"a": 1, "b": 1, "c": 1}
        assert calls == [["a", "b", "c"], ["b", "c"], ["c"]]

    asyncio.run(run())

"""Images fetched from URLs: requests, redirects, bodies."""

from __future__ import annotations

import asyncio

import pytest

from service.errors import TooManyRequests
from service.fetching.fetcher import make_fetcher
from service.fetching.image_urls import ImageUrl
from tests.support.fetching import Run, allowing
from tests.support.upstream import HOST, Resolver, Upstream, redirect, reply


def test_urls_are_replaced_by_their_images_in_order() -> None:
    run = Run({"/a?b=%20c": reply(b"one"), "/d": reply(b"two")}, ["/d", b"sent", "/a?b= c#e"])
    assert run.images == [b"two", b"sent", b"one"]


def test_request_has_only_the_necessary_headers() -> None:
    [head] = Run({"/": reply()}, ["/"]).upstream.heads
    lines = sorted(head.strip().split("\r\n")[1:])
    assert lines == [
        "Accept-Encoding: identity",
        "Accept: image/*",
        f"Host: {HOST}",
        "User-Agent: vision-sidecar",
    ]


def test_proxies_from_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert Run({"/": reply(b"direct")}, ["/"]).images == [b"direct"]


def test_cookies_are_not_kept() -> None:
    run = Run({"/": reply(b"", 302, location="/b", set_cookie="a=b"), "/b": reply()}, ["/"])
    assert "cookie" not in run.upstream.heads[1].lower()


def test_connections_are_pooled() -> None:
    kept = reply(b"kept", connection=None)

    async def twice() -> None:
        async with Upstream({"/": kept}) as upstream:
            resolver = Resolver({}, default=["127.0.0.1"])
            resolver.port = upstream.port
            fetcher = make_fetcher(allowing(), resolve=resolver)
            for _ in range(3):
                assert await fetcher.fetch([ImageUrl(f"http://{HOST}/")]) == [b"kept"]
            await fetcher.aclose()
            assert (upstream.num_connections, len(resolver.asked)) == (1, 1)

    asyncio.run(twice())


def test_bytes_are_counted_as_they_arrive_and_fetching_stops_without_room() -> None:
    held: list[int] = []

    def hold(num_bytes: int) -> None:
        held.append(num_bytes)
        if sum(held) > 100_000:
            raise TooManyRequests("full", code="too_many_bytes", retry_after_s=1)

    async def fetch(num_bytes: int) -> None:
        async with Upstream({"/": reply(b"x" * num_bytes)}) as upstream:
            resolver = Resolver({}, default=["127.0.0.1"])
            resolver.port = upstream.port
            fetcher = make_fetcher(allowing(), resolve=resolver)
            try:
                await fetcher.fetch([ImageUrl(f"http://{HOST}/")], hold)
            finally:
                await fetcher.aclose()

    asyncio.run(fetch(90_000))
    assert sum(held) == 90_000
    held.clear()
    with pytest.raises(TooManyRequests):
        asyncio.run(fetch(10_000_000))
    assert sum(held) < 1_000_000


@pytest.mark.parametrize("location", ["/b", "b", f"http://{HOST}/b", f"//{HOST}/b", "http://OTHER.test:80/b"])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed(location: str, status: int) -> None:
    run = Run({"/a": redirect(location, status), "/b": reply(b"there")}, ["/a"])
    assert run.images == [b"there"]
    host = "other.test" if "OTHER" in location else HOST
    assert f"Host: {host}\r\n" in run.upstream.heads[1]


def test_three_redirects_are_followed_and_no_more() -> None:
    chain = {f"/{n}": redirect(f"/{n + 1}") for n in range(4)}
    run = Run({**chain, "/4": reply(b"end")}, ["/1"])
    assert run.images == [b"end"]
    run = Run({**chain, "/4": reply(b"end")}, ["/0"])
    assert run.refusal == (400, "image_url_rejected", "images[0]")
    assert len(run.upstream.heads) == 4
    loop = Run({"/": redirect("/")}, ["/"])
    assert loop.refusal == (400, "image_url_rejected", "images[0]")
    assert len(loop.upstream.heads) == 4


CHUNKED = reply(b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", content_length=None, transfer_encoding="chunked")


@pytest.mark.parametrize(
    ("script", "images"),
    [(CHUNKED, [b"abc"]), (reply(b"to the end", content_length=None), [b"to the end"])],
)
def test_bodies_of_unknown_length_are_read(script: bytes, images: list[bytes]) -> None:
    assert Run({"/": script}, ["/"]).images == images


def test_event_loop_is_free_while_tiny_chunks_arrive() -> None:
    body = b"1\r\nx\r\n" * 5000 + b"0\r\n\r\n"
    chunked = reply(body, content_length=None, transfer_encoding="chunked")

    async def main() -> int:
        async with Upstream({"/": chunked}) as upstream:
            resolver = Resolver({}, default=["127.0.0.1"])
            resolver.port = upstream.port
            fetcher = make_fetcher(allowing(), resolve=resolver)
            task = asyncio.create_task(fetcher.fetch([ImageUrl(f"http://{HOST}/")]))
            num_turns = 0
            while not task.done():
                await asyncio.sleep(0)
                num_turns += 1
            assert await task == [b"x" * 5000]
            await fetcher.aclose()
            return num_turns

    assert asyncio.run(main()) > 5000

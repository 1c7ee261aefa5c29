"""Fetches that fail, are late or are cancelled."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence

import pytest

from service.config.hosts import Address
from service.errors import ApiError
from service.fetching.fetcher import make_fetcher
from service.fetching.image_urls import ImageUrl
from tests.support.fetching import Run, allowing
from tests.support.upstream import HOST, Resolver, Script, Upstream, redirect, reply


async def trickle(writer: asyncio.StreamWriter) -> None:
    writer.write(reply(b"", content_length="1000"))
    for _ in range(200):
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


async def trickle_headers(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    for number in range(200):
        writer.write(b"x-%d: y\r\n" % number)
        await writer.drain()
        await asyncio.sleep(0.02)


async def say_nothing(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def hang_up_late(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(2)


async def flood(writer: asyncio.StreamWriter) -> None:
    writer.write(reply(b"", content_length=None, transfer_encoding="chunked"))
    for _ in range(1000):
        writer.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        await writer.drain()


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        pytest.param(reply(status=404), 400, "image_url_rejected", id="404"),
        pytest.param(reply(status=403), 400, "image_url_rejected", id="403"),
        pytest.param(reply(status=429), 400, "image_url_rejected", id="429"),
        pytest.param(reply(status=500), 502, "image_url_failed", id="500"),
        pytest.param(reply(status=503), 502, "image_url_failed", id="503"),
        pytest.param(reply(b"", status=204), 502, "image_url_failed", id="204"),
        pytest.param(reply(status=206), 502, "image_url_failed", id="206"),
        pytest.param(reply(b"", status=304), 502, "image_url_failed", id="304"),
        pytest.param(reply(status=302), 502, "image_url_failed", id="redirect to nowhere"),
        pytest.param(redirect("http://1.2.3.400/"), 502, "image_url_failed", id="redirect to no URL"),
        pytest.param(redirect("http://a:x/"), 502, "image_url_failed", id="redirect to no port"),
        pytest.param(redirect("file:///etc/hostname"), 400, "url_not_allowed", id="redirect to a file"),
        pytest.param(redirect("http://evil.test/"), 400, "url_not_allowed", id="redirect elsewhere"),
        pytest.param(redirect(f"http://{HOST}:81/"), 400, "url_not_allowed", id="redirect to a port"),
        pytest.param(reply(b""), 400, "empty_input", id="empty"),
        pytest.param(reply(content_length="9"), 502, "image_url_failed", id="shorter than it says"),
        pytest.param(reply(content_length="9" * 5000), 502, "image_url_failed", id="length of 5000 digits"),
        pytest.param(reply(content_length="-1"), 502, "image_url_failed", id="negative length"),
        pytest.param(reply(content_encoding="gzip"), 502, "image_url_failed", id="gzip"),
        pytest.param(reply(content_encoding="identity, br"), 502, "image_url_failed", id="identity, br"),
        pytest.param(b"SSH-2.0-OpenSSH_9\r\n\r\n", 502, "image_url_failed", id="no HTTP"),
        pytest.param(reply(big="x" * 200_000), 502, "image_url_failed", id="large headers"),
        pytest.param(reply(b"x" * 1001), 413, "image_too_large", id="too large"),
        pytest.param(reply(content_length="1001"), 413, "image_too_large", id="says that it is too large"),
        pytest.param(flood, 413, "image_too_large", id="without end"),
        pytest.param(trickle, 504, "image_url_timeout", id="trickles"),
        pytest.param(trickle_headers, 504, "image_url_timeout", id="headers trickle"),
        pytest.param(say_nothing, 504, "image_url_timeout", id="silence"),
    ],
)
def test_failed_fetch_has_its_status_and_code(script: bytes | Script, status: int, code: str) -> None:
    timeout_s = 0.3 if status == 504 else 20
    run = Run({"/": script}, [b"sent", "/"], max_image_bytes=1000, media_timeout_s=timeout_s)
    assert run.refusal == (status, code, "images[1]")
    assert len(run.upstream.heads) == 1
    assert run.error is not None
    assert HOST not in run.error.message


def test_content_encoding_identity_is_accepted() -> None:
    assert Run({"/": reply(b"as it is", content_encoding="Identity")}, ["/"]).images == [b"as it is"]


def test_image_of_the_largest_size_is_fetched() -> None:
    assert Run({"/": reply(b"x" * 1000)}, ["/"], max_image_bytes=1000).images == [b"x" * 1000]


def test_max_body_bytes_limits_all_images_together() -> None:
    limits = {"max_image_bytes": 1000, "max_body_bytes": 2500}
    assert len(Run({"/": reply(b"x" * 800)}, ["/"] * 3, **limits).images) == 3
    run = Run({"/": reply(b"x" * 900)}, ["/"] * 3, **limits)
    assert run.error is not None
    assert (run.error.status, run.error.code) == (413, "body_too_large")


def test_one_failure_fails_the_request_and_names_the_image() -> None:
    run = Run({"/": hang_up_late, "/404": reply(status=404)}, ["/", "/404", "/"])
    assert run.refusal == (400, "image_url_rejected", "images[1]")


def test_timeout_names_the_first_late_image() -> None:
    run = Run({"/": reply(), "/late": say_nothing}, ["/", "/late", "/late"], media_timeout_s=1)
    assert run.refusal == (504, "image_url_timeout", "images[1]")


def test_nothing_is_fetched_if_one_url_is_refused() -> None:
    run = Run({"/": reply()}, ["/", "/", ":81/"])
    assert run.refusal == (400, "url_not_allowed", "images[2]")
    assert run.upstream.heads == []


def test_a_request_has_at_most_8_fetches_at_once() -> None:
    busy, most = 0, 0

    async def slow(writer: asyncio.StreamWriter) -> None:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0.02)
        busy -= 1
        writer.write(reply())

    assert Run({"/": slow}, ["/"] * 20).images == [b"image"] * 20
    assert most == 8


def test_failed_fetches_release_their_connections() -> None:
    async def fail_often() -> None:
        async with Upstream({"/": say_nothing, "/ok": reply()}) as upstream:
            resolver = Resolver({}, default=["127.0.0.1"])
            resolver.port = upstream.port
            fetcher = make_fetcher(allowing(media_timeout_s=1), resolve=resolver)
            # Each uses 8 connections, together more than the pool has.
            requests = [fetcher.fetch([ImageUrl(f"http://{HOST}/")] * 32) for _ in range(12)]
            failures = await asyncio.gather(*requests, return_exceptions=True)
            assert {getattr(failure, "code", failure) for failure in failures} == {"image_url_timeout"}
            assert await fetcher.fetch([ImageUrl(f"http://{HOST}/ok")]) == [b"image"]
            await fetcher.aclose()

    asyncio.run(fail_often())


@pytest.mark.parametrize("paths", [("/", "/gone"), ("/gone", "/"), ("/gone",)])
def test_error_of_a_fetch_keeps_no_image_alive(paths: Sequence[str], no_collection: None) -> None:
    """The error refers to the images that were fetched before it, and must not refer to itself."""

    async def fail() -> weakref.ref[ApiError]:
        async with Upstream({"/": reply(), "/gone": reply(status=404)}) as upstream:
            resolver = Resolver({}, default=["127.0.0.1"])
            resolver.port = upstream.port
            fetcher = make_fetcher(allowing(), resolve=resolver)
            try:
                await fetcher.fetch([ImageUrl(f"http://{HOST}{path}") for path in paths])
            except ApiError as error:
                return weakref.ref(error)
            finally:
                await fetcher.aclose()
        raise AssertionError("the fetch did not fail")

    assert asyncio.run(fail())() is None


def test_running_fetches_are_cancelled_when_another_fails() -> None:
    ended = []

    class Slow(Resolver):
        """Takes 2 s to look up any host but `HOST`."""

        async def __call__(self, host: str, port: int, /) -> Sequence[tuple[Address, int]]:
            if host == HOST:
                return await super().__call__(host, port)
            try:
                await asyncio.sleep(2)
            except asyncio.CancelledError:
                ended.append(host)
                raise
            raise OSError("the look-up was not cancelled")

    async def fetch() -> None:
        fetcher = make_fetcher(allowing(), resolve=Slow({}))
        with pytest.raises(ApiError) as caught:
            await fetcher.fetch([ImageUrl("http://other.test/"), ImageUrl(f"http://{HOST}/")])
        assert caught.value.param == "images[1]"
        await fetcher.aclose()

    asyncio.run(fetch())
    assert ended == ["other.test"]

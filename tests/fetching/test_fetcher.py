"""Fetches image URLs from a real web server on loopback, with a resolver under the control of the test."""

from __future__ import annotations

import asyncio
import socket
import ssl
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import httpcore
import pytest
from prometheus_client import CollectorRegistry

from service.app import create_app
from service.config.hosts import Address
from service.config.settings import Settings
from service.engine.engine import State
from service.errors import ApiError, TooManyRequests
from service.fetching.fetcher import make_fetcher
from service.fetching.image_urls import ImageUrl
from tests.support.app import FakeEncoder, Service, encode_image, fake_replicas
from tests.support.upstream import HOST, PUBLIC, Dialler, Resolver, Script, Upstream, redirect, reply


def allowing(**changes: object) -> Settings:
    """Settings that allow fetching from this machine, under the host name that the tests give it."""
    defaults = {
        "allowed_media_domains": [HOST, "other.test"],
        "allowed_media_networks": ["127.0.0.0/8"],
        "decode_threads": 2,
    }
    return Settings.model_validate(defaults | changes)


class Run:
    """One call of the fetcher, with a server that has these answers. A string in `images` is a path on it."""

    def __init__(
        self, answers: Mapping[str, bytes | Script], images: Sequence[str | bytes], **changes: object
    ) -> None:
        self.upstream = Upstream(answers)
        self.images: list[bytes] = []
        self.error: ApiError | None = None
        items = [ImageUrl(f"http://{HOST}{x}") if isinstance(x, str) else x for x in images]
        asyncio.run(self._fetch(items, allowing(**changes)))

    async def _fetch(self, items: Sequence[bytes | ImageUrl], settings: Settings) -> None:
        async with self.upstream:
            resolver = Resolver({}, default=["127.0.0.1"])
            resolver.port = self.upstream.port
            fetcher = make_fetcher(settings, resolve=resolver)
            before = asyncio.all_tasks()
            try:
                self.images = await fetcher.fetch(items)
            except ApiError as error:
                self.error = error
            serving = {task for task in asyncio.all_tasks() if "_serve" in repr(task)}
            assert asyncio.all_tasks() - serving == before, "the fetch left a task behind"
            await fetcher.aclose()

    @property
    def refusal(self) -> tuple[int, str, str | None]:
        assert self.error is not None
        return self.error.status, self.error.code, self.error.param


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


class Lost(Resolver):
    """Finds no host."""

    async def __call__(self, host: str, port: int, /) -> Sequence[tuple[Address, int]]:
        raise socket.gaierror(socket.EAI_NONAME, "not known")


class Stuck(Resolver):
    """Never answers."""

    async def __call__(self, host: str, port: int, /) -> Sequence[tuple[Address, int]]:
        await asyncio.sleep(60)
        raise AssertionError


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


def closed_port() -> Resolver:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        resolver = Resolver({}, default=["127.0.0.1", "127.0.0.2"])
        resolver.port = unused.getsockname()[1]
        return resolver


@pytest.mark.parametrize(
    ("resolver", "status", "code"),
    [
        (Lost({}), 502, "image_url_failed"),
        (Resolver({}), 502, "image_url_failed"),
        (Stuck({}), 504, "image_url_timeout"),
        (closed_port(), 502, "image_url_failed"),
    ],
)
def test_unreachable_host_fails_the_fetch(resolver: Resolver, status: int, code: str) -> None:
    async def fetch() -> None:
        timeout_s = 0.5 if status == 504 else 20
        fetcher = make_fetcher(allowing(media_timeout_s=timeout_s), resolve=resolver)
        with pytest.raises(ApiError) as caught:
            await fetcher.fetch([ImageUrl(f"http://{HOST}/")])
        assert (caught.value.status, caught.value.code, caught.value.param) == (status, code, "images[0]")
        await fetcher.aclose()

    asyncio.run(fetch())


def test_next_address_is_tried_if_the_first_fails() -> None:
    class Half(httpcore.AnyIOBackend):
        """Reaches the second address only."""

        async def connect_tcp(
            self,
            host: str,
            port: int,
            timeout: float | None = None,  # noqa: ASYNC109 - the signature is httpcore's
            local_address: str | None = None,
            socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
        ) -> httpcore.AsyncNetworkStream:
            shares.append(timeout)
            if host == "127.0.0.9":
                raise httpcore.ConnectTimeout
            return await super().connect_tcp(host, port, timeout)

    shares: list[float | None] = []

    async def fetch() -> list[bytes]:
        async with Upstream({"/": reply(b"second")}) as upstream:
            resolver = Resolver({}, default=["127.0.0.9", "127.0.0.1"])
            resolver.port = upstream.port
            fetcher = make_fetcher(allowing(media_timeout_s=4), resolve=resolver, dialler=Half())
            images = await fetcher.fetch([ImageUrl(f"http://{HOST}/")])
            await fetcher.aclose()
            return images

    assert asyncio.run(fetch()) == [b"second"]
    assert shares == [2, 2]


class Tls(httpcore.AsyncNetworkStream):
    """A connection that records the arguments of its TLS handshake and then fails."""

    def __init__(self) -> None:
        self.context: ssl.SSLContext | None = None
        self.server_hostname: str | None = None

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - the signature is httpcore's
    ) -> httpcore.AsyncNetworkStream:
        self.context, self.server_hostname = ssl_context, server_hostname
        raise httpcore.ConnectError

    async def aclose(self) -> None:
        """Does nothing, because nothing is open."""


def test_tls_certificate_is_checked_against_the_host_name() -> None:
    stream = Tls()
    dialled = []

    class Securing(httpcore.AnyIOBackend):
        async def connect_tcp(
            self,
            host: str,
            port: int,
            timeout: float | None = None,  # noqa: ASYNC109 - the signature is httpcore's
            local_address: str | None = None,
            socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
        ) -> httpcore.AsyncNetworkStream:
            dialled.append((host, port))
            return stream

    async def fetch() -> None:
        resolver = Resolver({HOST: [[PUBLIC]]})
        fetcher = make_fetcher(allowing(), resolve=resolver, dialler=Securing())
        with pytest.raises(ApiError, match="its server failed"):
            await fetcher.fetch([ImageUrl(f"https://{HOST}/")])
        await fetcher.aclose()

    asyncio.run(fetch())
    assert dialled == [(PUBLIC, 443)]
    assert stream.server_hostname == HOST
    assert stream.context is not None
    assert (stream.context.check_hostname, stream.context.verify_mode) == (True, ssl.CERT_REQUIRED)


def test_the_app_closes_the_connections_of_its_fetcher() -> None:
    async def live() -> None:
        async with Upstream({"/": reply(connection=None)}) as upstream:
            resolver = Resolver({}, default=["127.0.0.1"])
            resolver.port = upstream.port
            fetcher = make_fetcher(allowing(), resolve=resolver)
            app = create_app(
                allowing(),
                start_replicas=lambda settings: fake_replicas(FakeEncoder()),
                start_fetcher=lambda settings: fetcher,
            )
            async with app.router.lifespan_context(app):
                assert await fetcher.fetch([ImageUrl(f"http://{HOST}/")]) == [b"image"]
                assert upstream.num_open == 1  # kept for the next image
            async with asyncio.timeout(10):
                while upstream.num_open:  # noqa: ASYNC110 - there is no event to wait for
                    await asyncio.sleep(0.01)

    asyncio.run(live())


def test_request_with_urls_from_end_to_end() -> None:
    image = encode_image()
    upstream = Upstream({"/a.png": reply(image), "/gone": reply(status=404), "/to": redirect("/a.png")})
    dialler = Dialler({PUBLIC: upstream}, Upstream({}))
    start = partial(make_fetcher, resolve=Resolver({HOST: [[PUBLIC]]}), dialler=dialler)
    registry = CollectorRegistry()
    encoder = FakeEncoder()
    app = create_app(
        Settings(allowed_media_domains=(HOST,), decode_threads=2),
        registry=registry,
        start_replicas=lambda settings: fake_replicas(encoder),
        start_fetcher=start,
    )
    service = Service(app, registry, encoder)
    service.start()
    service.wait_for(State.READY)
    service.runner.run(upstream.__aenter__())
    try:
        url = f"http://{HOST}/a.png"
        sent = service.embed(image).json()
        fetched = service.request("POST", "/embed", json={"images": [url, {"url": f"http://{HOST}/to"}]})
        assert fetched.status_code == 200
        for entry in fetched.json()["data"]:
            assert entry["embedding"] == sent["data"][0]["embedding"]
            assert entry["sha256"] == sent["data"][0]["sha256"]
        assert "fetch;dur=" in fetched.headers["server-timing"]
        assert service.metric("stage_duration_seconds_count", stage="fetch") == 1
        refused = service.request("POST", "/embed", json={"images": [url, f"http://{HOST}/gone"]})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (
            400,
            "image_url_rejected",
            "images[1]",
        )
        assert service.metric("errors_total", code="image_url_rejected") == 1
        before = len(upstream.heads)
        conflict = {"images": [url], "pooling": "none", "normalize": True}
        assert service.request("POST", "/embed", json=conflict).json()["error"]["code"] == "option_conflict"
        assert len(upstream.heads) == before
    finally:
        service.runner.run(upstream.__aexit__(None, None, None))
        service.stop()

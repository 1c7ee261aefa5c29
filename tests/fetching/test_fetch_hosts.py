"""Hosts of image URLs: addresses, TLS, and the app around the fetcher."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterable, Sequence
from functools import partial

import httpcore
import pytest
from prometheus_client import CollectorRegistry

from service.app import create_app
from service.config.hosts import Address
from service.config.settings import Settings
from service.engine.engine import State
from service.errors import ApiError
from service.fetching.fetcher import make_fetcher
from service.fetching.image_urls import ImageUrl
from tests.support.app import FakeEncoder, Service, encode_image, fake_replicas
from tests.support.fetching import allowing
from tests.support.upstream import HOST, PUBLIC, Dialler, Resolver, Upstream, redirect, reply


class Lost(Resolver):
    """Finds no host."""

    async def __call__(self, host: str, port: int, /) -> Sequence[tuple[Address, int]]:
        raise socket.gaierror(socket.EAI_NONAME, "not known")


class Stuck(Resolver):
    """Never answers."""

    async def __call__(self, host: str, port: int, /) -> Sequence[tuple[Address, int]]:
        await asyncio.sleep(60)
        raise AssertionError


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

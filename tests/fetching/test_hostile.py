"""URLs that try to reach forbidden servers. A canary receives every connection, whatever its target."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from service.app import create_app
from service.config.settings import Settings
from service.engine.engine import State
from service.errors import ApiError, BadRequest, UpstreamFailed
from service.fetching.fetcher import make_fetcher
from service.fetching.image_urls import MAX_URL_BYTES, ImageUrl, check_url, join_url, parse_url
from tests.support.app import FakeEncoder, Service, fake_replicas
from tests.support.upstream import HOST, PUBLIC, REFUSED, Dialler, Resolver, Upstream, redirect, reply

# The host `images.test` is allowed. Every look-up returns 127.0.0.1.
HOSTILE = [
    "http://127.0.0.1/",
    "http://127.1/",
    "http://127.0.1/",
    "http://2130706433/",
    "http://0x7f000001/",
    "http://0x7f.0x0.0x0.0x1/",
    "http://0X7F.1/",
    "http://017700000001/",
    "http://0177.0.0.1/",
    "http://0177.0.0.01/",
    "http://00000177.1/",
    "http://127.0.0.1./",
    "http://0/",
    "http://0.0.0.0/",
    "http://[::]/",
    "http://[::1]/",
    "http://[0:0:0:0:0:0:0:1]/",
    "http://[::127.0.0.1]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/",
    "http://[0:0:0:0:0:ffff:127.0.0.1]/",
    "http://[64:ff9b::127.0.0.1]/",
    "http://[2002:7f00:1::]/",
    "http://[fe80::1%25lo]/",
    "http://[fe80::1%lo]/",
    "http://[fd00:ec2::254]/latest/meta-data/",
    "http://169.254.169.254/latest/meta-data/",
    "http://2852039166/latest/meta-data/",
    "http://[::ffff:169.254.169.254]/",
    "http://metadata.google.internal/computeMetadata/v1/",
    "http://100.100.100.200/",
    "http://168.63.129.16/",
    "http://10.0.0.1/",
    "http://192.168.0.1/",
    "http://172.16.0.1/",
    "http://255.255.255.255/",
    "http://224.0.0.1/",
    "http://localhost/",
    "http://LOCALHOST/",
    "http://localhost./",
    "http://localhost.localdomain/",
    "http://127.0.0.1.nip.test/",
    f"http://{HOST}./",
    f"http://{HOST}.evil.test/",
    f"http://evil.test/{HOST}",
    f"http://evil.test?{HOST}",
    f"http://evil.test#{HOST}",
    f"http://evil.test#@{HOST}/",
    f"http://evil.test?@{HOST}/",
    f"http://sub.{HOST}/",
    f"http://{HOST}@127.0.0.1/",
    f"http://{HOST}:80@127.0.0.1/",
    f"http://{HOST}%40127.0.0.1/",
    f"http://127.0.0.1@{HOST}/",
    f"http://user:password@{HOST}/",
    f"http://@127.0.0.1:80@{HOST}/",
    f"http://127.0.0.1\\@{HOST}/",
    f"http://127.0.0.1\\.{HOST}/",
    f"http://{HOST}\\@127.0.0.1/",
    f"http:\\\\{HOST}/",
    f"http:/{HOST}/",
    f"http:{HOST}/",
    f"http:///{HOST}/",
    "http://",
    "http:///",
    "http://:80/",
    "http://?",
    f"http://{HOST}:81/",
    f"http://{HOST}:22/",
    f"http://{HOST}:0/",
    f"http://{HOST}:65536/",
    f"http://{HOST}:-80/",
    f"http://{HOST}:80:80/",
    f"http://{HOST}:\u0668\u0660/",  # Arabic digits
    f"http://{HOST}:\uff18\uff10/",  # full-width digits
    f"http://{HOST}:8_0/",
    f"http://{HOST}:+80/",
    f"http://{HOST}:443/",
    f"https://{HOST}:80/",
    f"http://{HOST} /",
    f"http:// {HOST}/",
    f"http://{HOST}\t/",
    f"http://{HOST}/\r\nx: y",
    f"http://{HOST}\x00.evil.test/",
    "http://１２７.0.0.1/",
    "http://127。0。0。1/",
    "http://①②⑦.0.0.1/",
    "http://ⓛocalhost/",
    "http://images.tеst/",  # with a Cyrillic letter
    "http://images.test\u200b/",
    "http://images\u3002evil/",
    "http://\ud800/",
    "http://%6c%6f%63%61%6c%68%6f%73%74/",
    "http://images%2etest/",
    "http://[images.test]/",
    f"http://{'a' * 70_000}/",
    f"http://{HOST}/{'a' * MAX_URL_BYTES}",
    f"http://{HOST}/" + "\u00e0" * 10_930,
    f"http://{HOST.upper()}/" + "\U0001f600" * MAX_URL_BYTES,
    "ftp://images.test/",
    "file:///etc/hostname",
    "gopher://127.0.0.1:6379/_INFO",
    "ws://images.test/",
    "unix:///var/run/docker.sock",
    "jar:http://images.test!/",
    "javascript:alert(1)",
    "view-source:http://images.test/",
    "about:blank",
]


class World:
    """A fetcher whose connections end at the canary, except those to `PUBLIC`, which reach `server`."""

    def __init__(self, resolver: Resolver, answers: Mapping[str, bytes] = {}) -> None:
        self.canary = Upstream({"/": reply(b"canary")})
        self.server = Upstream(answers)
        self.resolver = resolver
        self.dialler = Dialler({PUBLIC: self.server}, self.canary)

    def fetch(self, *urls: str, networks: Sequence[str] = ()) -> list[bytes | ApiError]:
        """Fetches the URLs one after the other; returns the image or the error of each."""
        settings = Settings.model_validate(
            {"allowed_media_domains": [HOST], "allowed_media_networks": networks, "media_timeout_s": 5}
        )
        return asyncio.run(self._fetch(urls, settings))

    async def _fetch(self, urls: Sequence[str], settings: Settings) -> list[bytes | ApiError]:
        results: list[bytes | ApiError] = []
        async with self.canary, self.server:
            fetcher = make_fetcher(settings, resolve=self.resolver, dialler=self.dialler)
            for url in urls:
                try:
                    results += await fetcher.fetch([ImageUrl(url)])
                except ApiError as error:
                    results.append(error)
            await fetcher.aclose()
        return results


def everything_is_local() -> Resolver:
    return Resolver({}, default=["127.0.0.1"])


def codes(results: Sequence[bytes | ApiError]) -> list[str]:
    return [result.code if isinstance(result, ApiError) else result.decode() for result in results]


def test_hostile_urls_are_many_and_distinct() -> None:
    assert len(HOSTILE) == len(set(HOSTILE)) >= 40


def test_canary_is_reached_if_nothing_is_refused() -> None:
    world = World(everything_is_local())
    assert world.fetch(f"http://{HOST}/", networks=["127.0.0.0/8"]) == [b"canary"]
    assert (world.dialler.dialled, world.canary.num_connections) == ([("127.0.0.1", 80)], 1)


def test_no_hostile_url_is_looked_up_or_dialled() -> None:
    world = World(everything_is_local())
    results = world.fetch(*HOSTILE, networks=["0.0.0.0/0", "::/0"])
    assert dict(zip(HOSTILE, codes(results), strict=True)) == dict.fromkeys(HOSTILE, "url_not_allowed")
    assert (world.resolver.asked, world.dialler.dialled, world.canary.num_connections) == ([], [], 0)


def test_no_redirect_to_a_hostile_url_is_followed() -> None:
    # A header cannot hold line breaks or lone surrogates, and a large header is refused for its size.
    targets = [url for url in HOSTILE if url.isprintable() and len(url) < 1000]
    targets += ["//127.0.0.1/", "//evil.test/", "\\\\127.0.0.1/", "http:127.0.0.1", "///127.0.0.1/"]
    answers = {f"/{number}": redirect(url) for number, url in enumerate(targets)}
    world = World(Resolver({HOST: [[PUBLIC]]}, default=["127.0.0.1"]), answers)
    results = world.fetch(*[f"http://{HOST}/{number}" for number in range(len(targets))])
    # A target without a host is a path on the same server, which answers 404.
    assert set(codes(results)) == {"url_not_allowed", "image_url_failed", "image_url_rejected"}
    assert codes(results).count("url_not_allowed") >= 40
    assert {host for host, _ in world.dialler.dialled} == {PUBLIC}
    assert set(world.resolver.asked) == {HOST}
    assert (len(world.server.heads) >= len(targets), world.canary.num_connections) == (True, 0)


@pytest.mark.parametrize("address", REFUSED)
def test_allowed_host_with_a_refused_address_is_not_dialled(address: str) -> None:
    answers = [[address], [PUBLIC, address], [address, PUBLIC], [PUBLIC, "2606:4700::1", address]]
    world = World(Resolver({HOST: answers}))
    assert codes(world.fetch(*[f"http://{HOST}/", f"https://{HOST}/"] * 2)) == ["url_not_allowed"] * 4
    assert len(world.resolver.asked) == 4
    assert (world.dialler.dialled, world.canary.num_connections) == ([], 0)


def test_second_look_up_cannot_change_the_dialled_address() -> None:
    """DNS rebinding: the checked address is dialled, and each further connection is checked again."""
    resolver = Resolver({HOST: [[PUBLIC], ["127.0.0.1"], [PUBLIC], ["::1"]]})
    world = World(resolver, {"/": reply(b"public")})
    results = world.fetch(*[f"http://{HOST}/"] * 4)
    assert codes(results) == ["public", "url_not_allowed", "public", "url_not_allowed"]
    assert world.dialler.dialled == [(PUBLIC, 80)] * 2
    assert (len(resolver.asked), world.canary.num_connections) == (4, 0)


def test_redirect_to_the_same_host_is_looked_up_again() -> None:
    resolver = Resolver({HOST: [[PUBLIC], ["169.254.169.254"]]})
    world = World(resolver, {"/": redirect(f"http://{HOST}/latest/meta-data/")})
    assert codes(world.fetch(f"http://{HOST}/")) == ["url_not_allowed"]
    assert (world.dialler.dialled, world.canary.num_connections) == ([(PUBLIC, 80)], 0)


def test_a_refused_host_and_a_refused_address_look_the_same() -> None:
    [host, address] = World(everything_is_local()).fetch("http://evil.test/", f"http://{HOST}/")
    assert isinstance(host, ApiError)
    assert isinstance(address, ApiError)
    assert host.body() == address.body()
    assert (host.status, host.headers()) == (address.status, address.headers())


def as_items(url: str) -> list[Any]:
    return [url, {"url": url}]


@pytest.mark.parametrize("domains", [(), (HOST,)])
def test_app_connects_nowhere_for_a_hostile_url(domains: tuple[str, ...]) -> None:
    canary = Upstream({"/": reply()})
    resolver = everything_is_local()
    dialler = Dialler({}, canary)
    encoder, registry = FakeEncoder(), CollectorRegistry()
    app = create_app(
        Settings(allowed_media_domains=domains, decode_threads=2),
        registry=registry,
        start_replicas=lambda settings: fake_replicas(encoder),
        start_fetcher=partial(make_fetcher, resolve=resolver, dialler=dialler),
    )
    service = Service(app, registry, encoder)
    service.start()
    service.wait_for(State.READY)
    service.runner.run(canary.__aenter__())
    urls = [*HOSTILE, f"http://{HOST}/", f"https://{HOST}/"]
    try:
        for url in urls:
            for item in as_items(url):
                response = service.request(
                    "POST",
                    "/embed",
                    content=json.dumps({"images": [item]}),
                    headers={"content-type": "application/json"},
                )
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, "images[0]"), item
                assert error["code"] == "url_not_allowed", item
    finally:
        service.runner.run(canary.__aexit__(None, None, None))
        service.stop()
    assert (dialler.dialled, canary.num_connections, encoder.batches) == ([], 0, [])
    assert resolver.asked == ([HOST] * 4 if domains else [])


def test_fetched_url_has_one_spelling() -> None:
    assert str(check_url(parse_url("HTTP://IMAGES.test:80/A?b"), [HOST])) == f"http://{HOST}/A?b"
    assert str(check_url(parse_url("https://[2A00:0::1]:443/"), ["2a00::1"])) == "https://[2a00::1]/"


@pytest.mark.parametrize("port", ["", ":", ":80", ":0080"])
def test_port_may_have_ascii_digits_only(port: str) -> None:
    assert str(check_url(parse_url(f"http://{HOST}{port}/"), [HOST])) == f"http://{HOST}/"
    with pytest.raises(BadRequest):
        parse_url(f"http://[2a00::1]{port}\u0668/")


def test_the_longest_url_may_be_fetched() -> None:
    url = f"http://{HOST}/\u00e0".ljust(MAX_URL_BYTES - 1, "a")
    assert check_url(parse_url(url), [HOST]).raw_path.startswith(b"/%C3%A0aa")
    with pytest.raises(BadRequest):
        parse_url(url + "a")


def test_redirect_to_a_too_long_url_fails() -> None:
    url = parse_url(f"http://{HOST}/")
    assert len(str(join_url(url, "/".ljust(MAX_URL_BYTES, "a")))) > MAX_URL_BYTES
    with pytest.raises(UpstreamFailed):
        join_url(url, "/".ljust(MAX_URL_BYTES + 1, "a"))
    with pytest.raises(UpstreamFailed):
        join_url(url, f"//{HOST}:\u0668\u0660/")


def test_url_whose_escaped_form_is_too_long_is_refused() -> None:
    url = httpx.URL("http://[2A00:0::1]/" + "\u00e0" * 10_930)
    with pytest.raises(BadRequest) as caught:
        check_url(url, ["2a00::1"])
    assert caught.value.code == "url_not_allowed"


def test_event_loop_is_free_between_the_checks_of_two_urls() -> None:
    async def main() -> int:
        fetcher = make_fetcher(Settings(allowed_media_domains=(HOST,)), resolve=everything_is_local())
        task = asyncio.create_task(
            fetcher.fetch([ImageUrl(f"http://{HOST}/")] * 20 + [ImageUrl("http://x/")])
        )
        num_turns = 0
        while not task.done():
            await asyncio.sleep(0)
            num_turns += 1
        with pytest.raises(BadRequest):
            task.result()
        await fetcher.aclose()
        return num_turns

    assert asyncio.run(main()) > 20

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.config.hosts import canonical_host
from service.fetching.addresses import is_allowed
from tests.support.upstream import REFUSED


@pytest.mark.parametrize("text", REFUSED)
def test_addresses_that_are_not_public_are_refused_unless_their_network_is_named(text: str) -> None:
    address = ip_address(text)
    assert not is_allowed(address, ())
    assert not is_allowed(address, [ip_network("8.8.8.8/32"), ip_network("2a00::/16")])
    assert is_allowed(address, [ip_network("0.0.0.0/0"), ip_network("::/0")])


@settings(derandomize=True, max_examples=500, deadline=None)
@given(st.ip_addresses())
def test_nothing_is_allowed_that_the_standard_library_calls_private(
    address: IPv4Address | IPv6Address,
) -> None:
    mapped = getattr(address, "ipv4_mapped", None)
    assert not is_allowed(address, ()) or ((mapped or address).is_global and not address.is_multicast)


@pytest.mark.parametrize(
    "text",
    [
        "1.1.1.1",
        "8.8.8.8",
        "93.184.215.14",
        "100.63.255.255",
        "100.128.0.1",
        "172.32.0.1",
        "223.255.255.254",
        "2606:4700::1111",
        "2a00:1450::1",
        "::ffff:8.8.8.8",
        "64:ff9b::8.8.8.8",
    ],
)
def test_public_addresses_are_allowed(text: str) -> None:
    assert is_allowed(ip_address(text), ())


@pytest.mark.parametrize(
    ("text", "network", "expected"),
    [
        ("10.1.2.3", "10.1.0.0/16", True),
        ("10.2.2.3", "10.1.0.0/16", False),
        ("::ffff:10.1.2.3", "10.1.0.0/16", True),
        ("64:ff9b::10.1.2.3", "10.1.0.0/16", True),
        ("64:ff9b::10.1.2.3", "64:ff9b::/96", True),
        ("64:ff9b::10.1.2.3", "11.0.0.0/8", False),
        ("fd12::1", "fd12::/16", True),
        ("fd13::1", "fd12::/16", False),
        ("127.0.0.1", "::/0", False),
    ],
)
def test_a_network_that_is_named_is_allowed_and_no_other(text: str, network: str, expected: bool) -> None:
    assert is_allowed(ip_address(text), [ip_network(network)]) is expected


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("images.example.org", "images.example.org"),
        ("Images.EXAMPLE.org", "images.example.org"),
        ("localhost", "localhost"),
        ("my_bucket.example.org", "my_bucket.example.org"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("BÜCHER.example", "xn--bcher-kva.example"),
        ("straße.example", "xn--strae-oqa.example"),
        ("a。example", "a.example"),
        ("10.0.0.1", "10.0.0.1"),
        ("2001:DB8:0::1", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("1.2.3.example", "1.2.3.example"),
        ("0x7f.example", "0x7f.example"),
        ("a" * 63 + ".org", "a" * 63 + ".org"),
    ],
)
def test_a_host_has_one_spelling(text: str, host: str) -> None:
    assert canonical_host(text) == host
    assert canonical_host(host) == host


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "example.org.",
        ".example.org",
        "a..b",
        "-a.org",
        "a-.org",
        "*.example.org",
        "*",
        "a b",
        "a/b",
        "user@example.org",
        "example.org:80",
        "https://example.org",
        "a\\b",
        "a%2eb",
        "a\n",
        "a" * 64,
        ".".join(["a" * 60] * 5),
        "2130706433",
        "0x7f000001",
        "0X7F.1",
        "0177.0.0.1",
        "127.1",
        "127.0.0.1.",
        "127.0.0.01",
        "1.2.3.4.5",
        "example.1",
        "256.0.0.1",
        "0x",
        "fe80::1%1",
        "[::1",
        "::g",
        "１２７.0.0.1",
        "①.example",
        "�.org",
        "xn--ß.org",
    ],
)
def test_what_is_no_host_or_has_another_spelling_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        canonical_host(text)

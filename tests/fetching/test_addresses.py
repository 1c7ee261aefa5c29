from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.fetching.addresses import is_allowed
from tests.support.upstream import REFUSED


@pytest.mark.parametrize("text", REFUSED)
def test_non_public_address_is_allowed_only_in_a_listed_network(text: str) -> None:
    address = ip_address(text)
    assert not is_allowed(address, ())
    assert not is_allowed(address, [ip_network("8.8.8.8/32"), ip_network("2a00::/16")])
    assert is_allowed(address, [ip_network("0.0.0.0/0"), ip_network("::/0")])


@settings(derandomize=True, max_examples=500, deadline=None)
@given(st.ip_addresses())
def test_no_address_is_allowed_that_the_standard_library_calls_private(
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
def test_only_addresses_of_the_listed_network_are_allowed(text: str, network: str, expected: bool) -> None:
    assert is_allowed(ip_address(text), [ip_network(network)]) is expected

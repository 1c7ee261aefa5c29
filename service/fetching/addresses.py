"""Decides from which IP addresses an image may be fetched, by pure rules without a look-up.

Knows what the blocks of the address space are for; knows nothing of hosts, URLs or sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import (
    IPv4Address,
    IPv6Address,
    IPv6Network,
    ip_network,
)

from service.config.hosts import Address, Network

# All public IPv6 addresses are in this block. Source: the IANA registry of the IPv6 address space.
_IPV6_UNICAST = IPv6Network("2000::/3")
# The well-known prefix of NAT64 translators: the last four bytes are the IPv4 address behind it. RFC 6052.
_NAT64 = IPv6Network("64:ff9b::/96")
# Addresses that no public web server has. Sources: the IANA registries of special-purpose addresses.
# `is_global` of the standard library lacks some of these blocks, and differs between releases of Python.
_SPECIAL = tuple(
    ip_network(block)
    for block in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT; has a cloud's metadata service
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # a cloud's own services, at a public address
        "169.254.0.0/16",  # link-local; has metadata services
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments; has a metadata service
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # AMT
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
        "2001::/23",  # protocol assignments; has Teredo
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
    )
)


def is_allowed(address: Address, networks: Sequence[Network]) -> bool:
    """Whether an address is public or in one of `networks`."""
    reached = _reached(address)
    return _is_public(reached) or any(address in network or reached in network for network in networks)


def _reached(address: Address) -> Address:
    """The address that packets reach: the IPv4 address within a mapped or translated IPv6 address."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _is_public(address: Address) -> bool:
    if isinstance(address, IPv6Address) and address not in _IPV6_UNICAST:
        return False
    return not any(address in block for block in _SPECIAL)

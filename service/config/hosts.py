"""One canonical spelling for each host name and IP address.

Knows nothing of which hosts may be contacted.
"""

from __future__ import annotations

import re
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
)

import idna

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
_MAX_HOST_CHARS = 253
_BRACKETED = re.compile(r"\A\[(.*)\]\Z")
# The standards allow no underscore in a host name, but buckets and containers have them.
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
# The resolver reads a name whose last label is a number as an IPv4 address: 2130706433 and 0x7f.1 are both
# 127.0.0.1.
_ENDS_IN_NUMBER = re.compile(r"(.*\.)?([0-9]+|0x[0-9a-f]*)")


def canonical_host(text: str) -> str:
    """Returns a name in lower case and IDNA 2008, or an address without brackets.

    Raises `ValueError` for anything else, such as other spellings of addresses or a name that ends in a dot.
    """
    if ":" in text and "%" not in text:  # no zone
        return str(IPv6Address(_BRACKETED.sub(r"\1", text)))
    name = text.lower() if text.isascii() else _idna(text.lower())
    if _ENDS_IN_NUMBER.fullmatch(name):
        return str(IPv4Address(name))
    if len(name) > _MAX_HOST_CHARS or not _HOST_NAME.fullmatch(name):
        raise ValueError("not a host name")
    return name


def _idna(name: str) -> str:
    try:
        return idna.encode(name).decode()
    except idna.IDNAError:
        raise ValueError("not a host name") from None

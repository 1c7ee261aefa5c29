"""How a host is spelled: one spelling for each name and address.

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
# An underscore is in no host name of the standards, and in names of buckets and containers.
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
# The resolver reads what ends in such a label as an IPv4 address: 2130706433 and 0x7f.1 are 127.0.0.1.
_ENDS_IN_NUMBER = re.compile(r"(.*\.)?([0-9]+|0x[0-9a-f]*)")


def canonical_host(text: str) -> str:
    """The one spelling of a host: a name in lower case and IDNA 2008, or an address without brackets.

    Raises `ValueError` for all that is neither, such as other spellings of addresses, and for names with a
    dot at the end.
    """
    if ":" in text and "%" not in text:  # no zone
        return str(IPv6Address(_BRACKETED.sub(r"\1", text)))
    name = text.lower() if text.isascii() else _idna(text.lower())
    if _ENDS_IN_NUMBER.fullmatch(name):
        return str(IPv4Address(name))
    if len(name) > _MAX_HOST_CHARS or not _HOST_NAME.fullmatch(name):
        raise ValueError("no host name")
    return name


def _idna(name: str) -> str:
    try:
        return idna.encode(name).decode()
    except idna.IDNAError:
        raise ValueError("no host name") from None

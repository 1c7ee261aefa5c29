"""Decides which image URLs may be fetched, by pure rules on the URL itself, without a look-up.

Knows schemes, ports and hosts; `dialling` checks the addresses of a host.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

import httpx

from service.config.hosts import canonical_host
from service.errors import BadRequest, UpstreamFailed

PORTS = {"http": 80, "https": 443}
# In UTF-8. The library takes up to a microsecond for each byte.
MAX_URL_BYTES = 8192

_AUTHORITY = re.compile(r"(?:[^:/?#]*:)?//([^/?#]*)")
_HOST_AND_PORT = re.compile(r"(?:\[[^\]]*\]|[^:\[\]]*)(?::[0-9]*)?")


def parse_url(text: str) -> httpx.URL:
    """Parses an image URL. Raises `BadRequest` if it is malformed or has more than `MAX_URL_BYTES`."""
    if _is_too_long(text):
        raise _not_allowed(f"the image URL has more than the {MAX_URL_BYTES} bytes allowed")
    try:
        _check_port(text)
        return httpx.URL(text)
    except (httpx.InvalidURL, ValueError):  # a lone surrogate cannot be encoded
        raise _malformed() from None


def join_url(url: httpx.URL, location: str) -> httpx.URL:
    """The target of a redirect from `url`. Raises `UpstreamFailed` if it is malformed or too long."""
    if _is_too_long(location):
        raise UpstreamFailed(f"the image URL is redirected to a URL of more than {MAX_URL_BYTES} bytes")
    try:
        _check_port(location)
        return url.join(location)
    except (httpx.InvalidURL, ValueError):
        raise UpstreamFailed("the image URL is redirected to a malformed URL") from None


def _is_too_long(text: str) -> bool:
    return len(text) > MAX_URL_BYTES or len(text.encode(errors="replace")) > MAX_URL_BYTES


def _check_port(text: str) -> None:
    """Raises `ValueError` if a port has characters other than ASCII digits, which the library accepts."""
    authority = _AUTHORITY.match(text)
    if authority and not _HOST_AND_PORT.fullmatch(authority[1].rpartition("@")[2]):
        raise ValueError("no port")


def check_url(url: httpx.URL, domains: Collection[str]) -> httpx.URL:
    """Returns the URL with its host in the canonical spelling. Raises `BadRequest` if it may not be fetched.

    It must be http or https, on the scheme's own port, without a user, and its host must be in `domains`.
    """
    if not domains:
        raise _not_allowed(
            "image URLs are not enabled on this server; send the image's bytes, or a data: URI"
        )
    if url.scheme not in PORTS:
        raise _not_allowed("only http: and https: URLs are fetched")
    if url.userinfo:
        raise _not_allowed("image URLs with a user or password are not fetched")
    if url.port not in (None, PORTS[url.scheme]):
        raise _not_allowed("image URLs are fetched from port 80 (http) and 443 (https) only")
    try:
        host = canonical_host(url.raw_host.decode())
    except ValueError:
        raise url_refused() from None
    if host not in domains:
        raise url_refused()
    if host == url.raw_host.decode() and url.port is None:
        return url  # copying it would parse it again
    try:
        return url.copy_with(host=host, port=None)
    except httpx.InvalidURL:  # its escaped form is too long
        raise _malformed() from None


def url_refused() -> BadRequest:
    """The error for a host that is not allowed, and for a host with an address that is not allowed.

    It is the same, because a difference would reveal what a name means inside the network.
    """
    return _not_allowed("this server does not fetch images from that host")


def _malformed() -> BadRequest:
    return _not_allowed("the image URL is malformed")


def _not_allowed(message: str) -> BadRequest:
    return BadRequest(message, code="url_not_allowed")


@dataclass(frozen=True)
class ImageUrl:
    """An image that is still to be fetched. Of the URL, only the scheme has been checked."""

    url: str

from __future__ import annotations

import pytest

from service.config.hosts import canonical_host


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
def test_host_has_one_spelling(text: str, host: str) -> None:
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
def test_invalid_hosts_and_other_spellings_of_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        canonical_host(text)

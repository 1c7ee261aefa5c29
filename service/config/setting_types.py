"""Types of settings: a URL, and comma-separated lists of hosts, networks, origins and keys. All are checked.

Knows how a value is written. Knows nothing of how it is used.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_core import PydanticCustomError

from service.config.hosts import Network, canonical_host

_KEY = re.compile(r"[!-+\--~]+")
_KEY_FORM = "a key is one or more visible ASCII characters, without a comma"


def split_list(value: object) -> object:
    """Splits a comma-separated string. A blank string has no parts. Returns other values unchanged."""
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",")] if value.strip() else []


def _canonical_host(text: str) -> str:
    try:
        return canonical_host(text)
    except ValueError:
        raise PydanticCustomError(
            "host", "a host is a name such as images.example.org or an address, without a port or a path"
        ) from None


def _split_keys(value: object) -> object:
    """Like `split_list`, but refuses a blank string: an unset shell variable must not open the server."""
    keys = split_list(value)
    if isinstance(value, str) and not keys:
        raise PydanticCustomError("keys", "the list has no key")
    return keys


def _check_key(key: SecretStr) -> SecretStr:
    if not _KEY.fullmatch(key.get_secret_value()):
        raise PydanticCustomError("key", _KEY_FORM)
    return key


def _check_url(text: str) -> str:
    """Returns the URL without a slash at its end. The paths of the LLM server begin after it."""
    url = text.rstrip("/")
    try:
        is_usable = _is_llm_url(urlsplit(url))
    except ValueError:  # a port or an address that is none
        is_usable = False
    if not is_usable or not re.fullmatch(r"[!-~]+", url):
        raise PydanticCustomError(
            "url", "the URL of an LLM server is written like http://localhost:8000, without /v1"
        )
    return url


def _is_llm_url(parts: SplitResult) -> bool:
    is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    has_more = parts.query or parts.fragment or "@" in parts.netloc or parts.path.endswith("/v1")
    return is_server and not has_more


def _named(value: object) -> object:
    """Refuses an empty path, which would mean the working directory."""
    if value == "":
        raise PydanticCustomError("file", "the path is empty")
    return value


def read_keys(path: Path) -> tuple[SecretStr, ...]:
    """Reads one key from each line of a file. Ignores blank lines and lines that begin with #.

    Raises `ValueError` if the file cannot be read, has no key, or has a line that is not a key. The message
    shows no content of the file.
    """
    try:
        lines = [line.strip() for line in path.read_text("utf-8-sig").splitlines()]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None
    keys = {number: line for number, line in enumerate(lines, 1) if line and not line.startswith("#")}
    if not keys:
        raise ValueError(f"{path} has no key")
    for number, key in keys.items():
        if not _KEY.fullmatch(key):
            raise ValueError(f"line {number} of {path} is not a key: {_KEY_FORM}")
    return tuple(map(SecretStr, keys.values()))


_Host = Annotated[str, AfterValidator(_canonical_host)]
_Key = Annotated[SecretStr, AfterValidator(_check_key)]
# A scheme, a host and possibly a port, without a slash at the end, as browsers write an origin.
_Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+)$")]

Hosts = Annotated[tuple[_Host, ...], BeforeValidator(split_list)]
Keys = Annotated[tuple[_Key, ...], BeforeValidator(_split_keys)]
NamedFile = Annotated[Path, BeforeValidator(_named)]
Networks = Annotated[tuple[Network, ...], BeforeValidator(split_list)]
Origins = Annotated[tuple[_Origin, ...], BeforeValidator(split_list)]
Url = Annotated[str, AfterValidator(_check_url)]

"""Lists of hosts, networks, origins and keys, as settings hold them: comma-separated, and checked.

Knows how each is written; nothing of what is done with them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_core import PydanticCustomError

from service.config.hosts import Network, canonical_host

_KEY = re.compile(r"[!-+\--~]+")
_KEY_FORM = "a key is one or more visible ASCII characters, without a comma"


def split_list(value: object) -> object:
    """A comma-separated list into its parts; nothing into no part."""
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
    """As `split_list`; but no key is a mistake, as by an empty shell variable, that opens the server."""
    keys = split_list(value)
    if isinstance(value, str) and not keys:
        raise PydanticCustomError("keys", "it holds no key")
    return keys


def _check_key(key: SecretStr) -> SecretStr:
    if not _KEY.fullmatch(key.get_secret_value()):
        raise PydanticCustomError("key", _KEY_FORM)
    return key


def _named(value: object) -> object:
    """Not an empty path, which would be the working directory."""
    if value == "":
        raise PydanticCustomError("file", "it names no file")
    return value


def read_keys(path: Path) -> tuple[SecretStr, ...]:
    """The keys in a file, one a line; blank lines and lines that begin with # are ignored.

    Raises `ValueError`, which shows nothing of what stands in it, where it cannot be read, holds no key or
    anything that is none.
    """
    try:
        lines = [line.strip() for line in path.read_text("utf-8-sig").splitlines()]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None
    keys = {number: line for number, line in enumerate(lines, 1) if line and not line.startswith("#")}
    if not keys:
        raise ValueError(f"{path} holds no key")
    for number, key in keys.items():
        if not _KEY.fullmatch(key):
            raise ValueError(f"line {number} of {path} is no key: {_KEY_FORM}")
    return tuple(map(SecretStr, keys.values()))


_Host = Annotated[str, AfterValidator(_canonical_host)]
_Key = Annotated[SecretStr, AfterValidator(_check_key)]
# A scheme, a host and perhaps a port, as browsers write them: without a slash at the end.
_Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+)$")]

Hosts = Annotated[tuple[_Host, ...], BeforeValidator(split_list)]
Keys = Annotated[tuple[_Key, ...], BeforeValidator(_split_keys)]
NamedFile = Annotated[Path, BeforeValidator(_named)]
Networks = Annotated[tuple[Network, ...], BeforeValidator(split_list)]
Origins = Annotated[tuple[_Origin, ...], BeforeValidator(split_list)]

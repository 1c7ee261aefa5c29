"""The settings as an operator gives them: a flag and an environment variable for each, read into `Settings`.

Knows how each is written and what help says of it; nothing of what the values mean.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NoReturn, get_args

from pydantic import ValidationError

from service.config.settings import NEVER_EMPTY, SECRETS, Settings, flag_of
from service.errors import printable

ENV_PREFIX = "VISION_SIDECAR_"
_MAX_VALUE_CHARS = 64
_MAX_MESSAGE_CHARS = 400

# Kubernetes gives every pod these variables for a Service called vision-sidecar or vision-sidecar-something.
# They are not ours. No setting looks like one of them but the port, which is told by its value.
_SERVICE_LINK = re.compile(
    ENV_PREFIX
    + r"([A-Z0-9_]+_)?"
    + r"(SERVICE_HOST=.*|SERVICE_PORT(_[A-Z0-9_]+)?=.*|PORT=(tcp|udp|sctp)://.*"
    + r"|PORT_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?=.*)",
    re.DOTALL,
)


class SettingsError(Exception):
    """A flag or variable that cannot be used. The message is one line for the operator, and no long one."""

    def __init__(self, message: str) -> None:
        super().__init__(cut(message, _MAX_MESSAGE_CHARS))


def cut(text: str, max_chars: int) -> str:
    """The text, or its beginning and three dots."""
    return text if len(text) <= max_chars else text[:max_chars] + "..."


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one flag for each setting. Only flags that were given reach the namespace, as unparsed strings."""
    for name, field in Settings.model_fields.items():
        # Where the default is found at start, the description says so.
        default = "" if field.default_factory or field.default in (None, ()) else f" [{field.default}]"
        text = f"{field.description}{default} ({_variable(name)})".replace("%", "%%")
        if bool in get_args(field.annotation):
            _add_switch(parser, name, text)
            continue
        choices = [value for value in get_args(field.annotation) if isinstance(value, str)]
        metavar = (
            "{" + ",".join(choices) + "}" if choices else name.split("_per_")[0].rsplit("_", 1)[-1].upper()
        )
        for flag in _spellings(flag_of(name)):
            parser.add_argument(
                flag, dest=name, default=argparse.SUPPRESS, metavar=metavar, help=_visible(flag, text)
            )


def _add_switch(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    """`--name`, `--name=false` and `--no-name`."""
    for flag in _spellings(flag_of(name)):
        parser.add_argument(
            flag,
            dest=name,
            nargs="?",
            const="true",
            default=argparse.SUPPRESS,
            metavar="{true,false}",
            help=_visible(flag, text),
        )
    for flag in _spellings(flag_of(f"no_{name}")):
        parser.add_argument(
            flag,
            dest=name,
            action="store_const",
            const="false",
            default=argparse.SUPPRESS,
            help=_visible(flag, f"the same as {flag_of(name)}=false"),
        )


def _spellings(flag: str) -> list[str]:
    """The flag, and the same with underscores, which help does not mention."""
    return list(dict.fromkeys([flag, "--" + flag[2:].replace("-", "_")]))


def _visible(flag: str, text: str) -> str:
    return argparse.SUPPRESS if "_" in flag else text


def parse_settings(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Settings from flags (what follows `serve`) and environment variables; flags win.

    A variable that is empty counts as not set, unless it is there to keep strangers out. Raises
    `SettingsError`; `--help` prints and exits.
    """
    parser = _Parser(
        prog="vision-sidecar serve",
        description="Serve image embeddings over HTTP. The environment variable after a flag sets it too.",
        allow_abbrev=False,
        # Narrow enough for the longest variable to stay whole on 80 columns.
        formatter_class=partial(argparse.HelpFormatter, max_help_position=16),
    )
    add_arguments(parser)
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        # What stands alone may be a key behind a blank that should not be there.
        is_shown = unknown[0].startswith("-") or "api_keys" not in namespace
        given = printable(unknown[0].split("=", 1)[0]) if is_shown else "after --api-keys"
        raise SettingsError(
            f"unknown argument {given}{_suggestion(given, map(flag_of, Settings.model_fields))}"
        )
    flags: dict[str, str] = vars(namespace)
    variables = _read_environ(environ)
    try:
        return Settings.model_validate(variables | flags)
    except ValidationError as error:
        raise SettingsError(_describe(error, flags)) from None


def _read_environ(environ: Mapping[str, str]) -> dict[str, str]:
    names = {_variable(name): name for name in Settings.model_fields}
    values: dict[str, str] = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or _SERVICE_LINK.fullmatch(f"{variable}={value}"):
            continue
        if variable not in names:
            shown = printable(variable)
            raise SettingsError(f"unknown environment variable {shown}{_suggestion(shown, names)}")
        if value or names[variable] in NEVER_EMPTY:
            values[names[variable]] = value
    return values


def _suggestion(given: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(given, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _describe(error: ValidationError, flags: Mapping[str, str]) -> str:
    """The first problem, as one line that names the flag or variable, the value and what is allowed."""
    problem = error.errors(include_url=False)[0]
    if not problem["loc"]:
        return problem["msg"]
    name = str(problem["loc"][0])
    source = flag_of(name) if name in flags else _variable(name)
    value = "a value" if name in SECRETS else cut(repr(problem["input"]), _MAX_VALUE_CHARS)
    return f"{source}: {value} is not allowed; {problem['msg'][0].lower()}{problem['msg'][1:]}"

"""Command-line flags and environment variables, read into `Settings`. Each setting has one of both.

Knows how they are written and what `--help` prints. Knows nothing of what the values mean.
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

# Kubernetes sets these variables in each pod for a Service vision-sidecar or vision-sidecar-<name>. They
# are not settings. Only VISION_SIDECAR_PORT can be both: its value shows which.
_SERVICE_LINK = re.compile(
    ENV_PREFIX
    + r"([A-Z0-9_]+_)?"
    + r"(SERVICE_HOST=.*|SERVICE_PORT(_[A-Z0-9_]+)?=.*|PORT=(tcp|udp|sctp)://.*"
    + r"|PORT_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?=.*)",
    re.DOTALL,
)


class SettingsError(Exception):
    """A flag or a variable is unknown or has a bad value. The message is one short line for the operator."""

    def __init__(self, message: str) -> None:
        super().__init__(cut(message, _MAX_MESSAGE_CHARS))


def cut(text: str, max_chars: int) -> str:
    """The text if it is short enough, else its first `max_chars` characters and three dots."""
    return text if len(text) <= max_chars else text[:max_chars] + "..."


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each setting. The namespace gets only the flags that were given, as plain strings."""
    for name, field in Settings.model_fields.items():
        # The description itself names a default that is found at start.
        default = (
            "" if field.default_factory or field.default in (None, ()) else f" [{_shown(field.default)}]"
        )
        text = f"{field.description}{default} ({_variable(name)})".replace("%", "%%")
        if bool in (field.annotation, *get_args(field.annotation)):
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


def _shown(default: object) -> object:
    """A default as it is written on the command line."""
    return str(default).lower() if isinstance(default, bool) else default


def _add_switch(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    """Adds `--name`, `--name=true`, `--name=false` and `--no-name`."""
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
    """The flag, and its spelling with underscores, which `--help` does not show."""
    return list(dict.fromkeys([flag, "--" + flag[2:].replace("-", "_")]))


def _visible(flag: str, text: str) -> str:
    return argparse.SUPPRESS if "_" in flag else text


def parse_settings(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Reads the settings from flags (the arguments after `serve`) and from variables. Flags win.

    An empty variable counts as not set, but an empty one that restricts access (`NEVER_EMPTY`) is an error.
    Raises `SettingsError`. `--help` prints the help and exits.
    """
    parser = _Parser(
        prog="vision-sidecar serve",
        description="Serve image embeddings over HTTP. The variable in parentheses sets the flag, too.",
        allow_abbrev=False,
        # On 80 columns, the name of the longest variable still fits on one line.
        formatter_class=partial(argparse.HelpFormatter, max_help_position=16),
    )
    add_arguments(parser)
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        raise SettingsError(f"unknown argument {_unknown_argument(unknown[0], namespace)}")
    flags: dict[str, str] = vars(namespace)
    variables = _read_environ(environ)
    try:
        return Settings.model_validate(variables | flags)
    except ValidationError as error:
        raise SettingsError(_describe(error, flags)) from None


def _unknown_argument(argument: str, namespace: argparse.Namespace) -> str:
    # A word without a dash may be a key: `--api-keys one, two` has a space too many.
    if not argument.startswith("-") and "api_keys" in namespace:
        return "after --api-keys"
    given = printable(argument.split("=", 1)[0])
    if not given.startswith("--"):
        return given
    return given + _suggestion(given, "--", [flag_of(name) for name in (*Settings.model_fields, "help")])


def _read_environ(environ: Mapping[str, str]) -> dict[str, str]:
    names = {_variable(name): name for name in Settings.model_fields}
    values: dict[str, str] = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or _SERVICE_LINK.fullmatch(f"{variable}={value}"):
            continue
        if variable not in names:
            shown = printable(variable)
            suggestion = _suggestion(shown, ENV_PREFIX, names)
            raise SettingsError(f"unknown environment variable {shown}{suggestion}")
        if value or names[variable] in NEVER_EMPTY:
            values[names[variable]] = value
    return values


def _suggestion(given: str, prefix: str, known: Iterable[str]) -> str:
    """Suggests the known name that is most like the given one, if any is. Compares without the prefix."""
    names = [name.removeprefix(prefix) for name in known]
    close = difflib.get_close_matches(given.removeprefix(prefix), names, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def _describe(error: ValidationError, flags: Mapping[str, str]) -> str:
    """The first problem in one line: the flag or the variable, its value, and what is allowed."""
    problem = error.errors(include_url=False)[0]
    if not problem["loc"]:
        return problem["msg"]
    name = str(problem["loc"][0])
    source = flag_of(name) if name in flags else _variable(name)
    value = "a value" if name in SECRETS else cut(repr(problem["input"]), _MAX_VALUE_CHARS)
    return f"{source}: {value} is not allowed; {problem['msg'][0].lower()}{problem['msg'][1:]}"

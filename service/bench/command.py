"""The command `vision-sidecar bench`: selects a benchmark and parses its flags.

It imports each benchmark only when it is run: `bench serve` must not wait for torch or hold it in memory.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from typing import NoReturn


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Prints one line without the usage, like every error of the program."""
        self.exit(2, f"vision-sidecar bench: {' '.join(message.split())[:200]}; see {self.prog} --help\n")


def main(argv: Sequence[str]) -> int:
    """Runs a benchmark and returns the exit code."""
    parser = _Parser(prog="vision-sidecar bench", allow_abbrev=False)
    commands = parser.add_subparsers(
        dest="benchmark", required=True, metavar="BENCHMARK", parser_class=argparse.ArgumentParser
    )
    commands.add_parser("encoder", help="measure the encoder alone", add_help=False)
    commands.add_parser("serve", help="measure a running server under load", add_help=False)
    benchmark = parser.parse_args(argv[:1]).benchmark
    if benchmark == "serve":
        from service.bench import serve

        return _run("serve", serve.__doc__, serve.add_arguments, serve.run, argv[1:])
    from service.bench import encoder  # imports torch

    return _run("encoder", encoder.__doc__, encoder.add_arguments, encoder.run, argv[1:])


def _run(
    name: str,
    description: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
    argv: Sequence[str],
) -> int:
    parser = _Parser(prog=f"vision-sidecar bench {name}", description=description, allow_abbrev=False)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    return run(arguments)

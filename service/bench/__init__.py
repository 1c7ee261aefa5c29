"""The benchmarks that a user can run on their own machine: `vision-sidecar bench …`."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

from service.bench import encoder


def main(argv: Sequence[str]) -> int:
    """Runs a benchmark and returns the exit code."""
    parser = argparse.ArgumentParser(prog="vision-sidecar bench", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK")
    command = commands.add_parser("encoder", help="the encoder alone", description=encoder.__doc__)
    encoder.add_arguments(command)
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    return encoder.run(arguments)

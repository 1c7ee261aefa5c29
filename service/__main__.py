"""The command line: `vision-sidecar serve …` and `bench …`.

Exit codes: 0 after a signal and an orderly end, 1 where the model cannot be loaded, the device is lost or the
port cannot be had, 2 for a bad setting.

Imports nothing at its top that takes long, so that a signal, a bad flag or a port in use has its effect at
once, and not only when torch is loaded.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from service.bench import command as bench
from service.config.files import allow_many_files
from service.config.version import find_version

logger = logging.getLogger("service.__main__")  # __name__ is another one under `python -m`


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and no usage, as all complaints are."""
        self.exit(2, f"vision-sidecar: {' '.join(message.split())[:200]}; see vision-sidecar --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(prog="vision-sidecar", description="Image embeddings over HTTP.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"vision-sidecar {find_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=argparse.ArgumentParser)
    commands.add_parser("serve", help="serve embeddings; `serve --help` explains every flag", add_help=False)
    commands.add_parser("bench", help="measure an encoder or a server; see `bench --help`", add_help=False)
    command = parser.parse_args(arguments[:1]).command
    if command is None:
        parser.error("a command is missing: serve or bench")
    if command == "bench":
        return bench.main(arguments[1:])
    return serve(arguments[1:])


def serve(argv: Sequence[str]) -> int:
    """Serves as the flags and the environment say. Returns the exit code only where it could not begin."""
    # Until the server has handlers of its own. Nothing was begun that would have to be ended.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit)
    # These import pydantic and more: after the handlers.
    from service.config.arguments import SettingsError, parse_settings
    from service.config.logs import configure_logging

    try:
        settings = parse_settings(argv, os.environ)
    except SettingsError as error:
        sys.stderr.write(f"vision-sidecar: {error}\n")
        return 2
    configure_logging(settings.log_level, settings.log_format)
    try:
        listener = listen(settings.host, settings.port)
    except OSError as error:
        logger.error("cannot listen on %s:%d: %s", settings.host, settings.port, error.strerror or error)
        return 1
    logger.info("listening on %s", address(listener))
    # These import torch.
    from service import server
    from service.processes.supervisor import server_count, supervisor

    allow_many_files()
    num_servers = server_count.count_servers(settings)
    if num_servers:
        return supervisor.supervise(settings, listener, num_servers)
    return server.run(settings, listener)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the process wherever it is. An exception may get lost in a callback of an import."""
    os._exit(0)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on the first address that the host name stands for. Raises `OSError`.

    `::` is every address of the machine, those of IPv4 too where the system can do both on one socket.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError:
        raise OSError("this is no name of a host") from None
    family, _, _, _, where = found[0]
    is_dual = where[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(where, family=family, backlog=2048, dualstack_ipv6=is_dual)


def address(listener: socket.socket) -> str:
    """`http://127.0.0.1:8080`"""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


if __name__ == "__main__":
    sys.exit(main())

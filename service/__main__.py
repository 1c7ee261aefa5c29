"""The command line: `vision-sidecar serve` and `vision-sidecar bench`.

Exit codes: 0 after a signal and a regular shutdown, 1 if the model cannot be loaded, a device fails or the
port is not available, 2 for a bad setting.

Slow imports are inside functions. A signal, a bad flag or a port in use takes effect at once, and not only
after torch is imported.
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

logger = logging.getLogger("service.__main__")  # under `python -m`, `__name__` is `__main__`


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Prints one line without the usage, like every error of the program."""
        self.exit(2, f"vision-sidecar: {' '.join(message.split())[:200]}; see vision-sidecar --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(prog="vision-sidecar", description="Image embeddings over HTTP.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"vision-sidecar {find_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=argparse.ArgumentParser)
    commands.add_parser(
        "serve", help="serve embeddings over HTTP; `serve --help` explains every flag", add_help=False
    )
    commands.add_parser(
        "bench", help="measure the encoder or a running server; see `bench --help`", add_help=False
    )
    command = parser.parse_args(arguments[:1]).command
    if command is None:
        parser.error("a command is missing: serve or bench")
    if command == "bench":
        return bench.main(arguments[1:])
    return serve(arguments[1:])


def serve(argv: Sequence[str]) -> int:
    """Serves with the settings of flags and environment. Returns an exit code only if it cannot start."""
    # Until the server has its own handlers. Nothing that needs a shutdown has started before.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit)
    # After the handlers, because these import pydantic.
    from service.config.arguments import SettingsError, parse_settings
    from service.config.logs import configure_logging
    from service.handoff.folder import FolderError, open_handoff_folder

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
    try:
        folder = open_handoff_folder(settings)
    except FolderError as error:
        logger.error("%s", error)
        return 2
    # These import torch.
    from service import server
    from service.processes.supervisor import server_count, supervisor

    allow_many_files()
    num_servers = server_count.count_servers(settings)
    with folder:
        if num_servers:
            return supervisor.supervise(settings, listener, num_servers)
        return server.run(settings, listener)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the process at once. An exception could be lost in a callback of an import."""
    logging.shutdown()
    os._exit(0)


def listen(host: str, port: int) -> socket.socket:
    """Listens on the first address of the host. Raises `OSError`.

    `::` means every IPv6 address, and every IPv4 address if the system supports both on one socket.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError:
        raise OSError("not a host name") from None
    family, _, _, _, first = found[0]
    is_dual = first[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(first, family=family, backlog=2048, dualstack_ipv6=is_dual)


def address(listener: socket.socket) -> str:
    """The URL of the listener, such as `http://127.0.0.1:8080`."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


if __name__ == "__main__":
    sys.exit(main())

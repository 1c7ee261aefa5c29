"""The command line, `vision-sidecar serve …` and `bench …`, and the server process from start to exit code.

Exit codes: 0 after a signal and an orderly end, 1 where the model cannot be loaded, the device is lost or the
port cannot be had, 2 for a bad setting.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import cast

import uvicorn
from fastapi import FastAPI
from PIL import Image

from service import bench
from service.app import create_app, find_version
from service.arguments import SettingsError, parse_settings
from service.engine import Engine, State
from service.protocol import Protocol
from service.settings import Settings

logger = logging.getLogger("service.__main__")  # __name__ is another one under `python -m`

# Longer than the time for which common client pools keep an idle connection: the client should be the one to
# close it, or a request may be sent just as the server closes.
_KEEP_ALIVE_S = 75


class Server(uvicorn.Server):
    """uvicorn's server with our end: it goes on listening, and says 503, until what was admitted is done."""

    def __init__(self, app: FastAPI, engine: Engine, settings: Settings) -> None:
        # A partial class is all that uvicorn needs: it calls it once for a connection.
        protocol = partial(
            Protocol, header_timeout_s=settings.body_timeout_s, is_draining=lambda: self._deadline is not None
        )
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=cast(type[asyncio.Protocol], protocol),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        self._engine = engine
        self._grace_s = settings.shutdown_grace_s
        self._told_to_stop = False
        self._deadline: float | None = None  # of the drain, once it began; time.monotonic()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain from the next tick on, as a handler must take no lock. Second: end at once."""
        if self._told_to_stop:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self._told_to_stop = True

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second; True ends the server."""
        if self._deadline is None and (self._told_to_stop or self._engine.state is State.FAILED):
            logger.info("stopping, in at most %g s", self._grace_s)
            self._engine.drain()
            self._deadline = time.monotonic() + self._grace_s
        return await super().on_tick(counter) or self._is_drained()

    def _is_drained(self) -> bool:
        if self._deadline is None:
            return False
        remaining_s = self._deadline - time.monotonic()
        # What uvicorn may still take to send answers that are ready.
        self.config.timeout_graceful_shutdown = max(1, math.ceil(remaining_s))
        return self._engine.idle or remaining_s <= 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="vision-sidecar", description="Image embeddings over HTTP.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"vision-sidecar {find_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("serve", help="serve embeddings; `serve --help` explains every flag", add_help=False)
    commands.add_parser("bench", help="measure; `bench encoder --help` explains every flag", add_help=False)
    if parser.parse_args(arguments[:1]).command == "bench":
        return bench.main(arguments[1:])
    try:
        settings = parse_settings(arguments[1:], os.environ)
    except SettingsError as error:
        sys.stderr.write(f"vision-sidecar: {error}\n")
        return 2
    return serve(settings)


def serve(settings: Settings) -> int:
    """Serves until a signal or until the device fails, and returns the exit code."""
    configure_logging(settings.log_level)
    try:
        listener = listen(settings.host, settings.port)
    except OSError as error:
        logger.error("cannot listen on %s:%d: %s", settings.host, settings.port, error.strerror or error)
        return 1
    app = create_app(settings)
    engine: Engine = app.state.engine
    logger.info("listening on %s", address(listener))
    Server(app, engine, settings).run([listener])
    logger.info("stopped")
    code = 1 if engine.state is State.FAILED else 0
    if not engine.close():
        # A device thread that is loading or stuck would keep the interpreter from ending.
        logging.shutdown()
        os._exit(code)
    return code


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on the first address that the host name stands for. Raises `OSError`."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    return socket.create_server(where[:2], family=family, backlog=2048)


def address(listener: socket.socket) -> str:
    """`http://127.0.0.1:8080`"""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def configure_logging(level: str) -> None:
    """Our loggers at `level`, those of libraries at `warning` or less talkative, on stderr."""
    ours = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(
        level=max(ours, logging.WARNING),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for name in ("service", "models"):
        logging.getLogger(name).setLevel(ours)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # warns of every malformed body
    # Pillow warns from a fixed number of pixels on. The limit here is `max_image_pixels`.
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


if __name__ == "__main__":
    sys.exit(main())

"""The server process, from its first request to its exit code: uvicorn with our own shutdown.

Knows uvicorn, the app and the engine; knows nothing of flags. Its import takes seconds, because of torch.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import NoReturn, cast

import uvicorn
from fastapi import FastAPI
from PIL import Image

from service.app import create_app
from service.config.files import max_connections
from service.config.logs import end_process
from service.config.settings import Settings
from service.engine.engine import Engine, State
from service.errors import ApiError
from service.http.acceptor import Acceptor, ConnectionCounts, OwnCount
from service.http.http_protocol import Protocol
from service.metrics import Metrics

logger = logging.getLogger(__name__)

# Longer than common client pools keep an idle connection, so that the client closes it first. If the server
# closed it first, a request could be on its way.
_KEEP_ALIVE_S = 75
# Time for the error responses of requests that are cut off at the end of the grace.
_FAREWELL_S = 0.2


class Server(uvicorn.Server):
    """uvicorn's server with our own shutdown: it serves on for a delay, then drains and answers 503."""

    def __init__(
        self,
        app: FastAPI,
        settings: Settings,
        *,
        logs_lifecycle: bool = True,
        connections: ConnectionCounts | None = None,
    ) -> None:
        """`logs_lifecycle`: whether this process logs the stop; of several processes, one does.

        `connections` counts the connections of all processes that share the listener.
        """
        # A partial class is all that uvicorn needs: it calls it once for a connection.
        protocol = partial(
            Protocol,
            header_timeout_s=settings.body_timeout_s,
            is_draining=lambda: self._told_to_stop or self._engine.state is State.FAILED,
            count_refusal=self._count_refusal,
            on_closed=lambda: self._acceptor.count(),
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
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        self._engine: Engine = app.state.engine
        self._metrics: Metrics = app.state.metrics
        self._logs_lifecycle = logs_lifecycle
        self._connections: ConnectionCounts = connections or OwnCount()
        self._delay_s = settings.shutdown_delay_s
        self._grace_s = settings.shutdown_grace_s
        self._told_to_stop: bool = False
        # By time.monotonic(), once the server was told to stop.
        self._leaves_at: float | None = None  # new requests are refused from then on
        self._deadline: float | None = None  # of the drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal stops the server at its next tick, as a handler must take no lock.

        A second signal ends the process at once.
        """
        if self._told_to_stop:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self._told_to_stop = True

    def _count_refusal(self, error: ApiError) -> None:
        """Counts and logs an error that the HTTP protocol sent: the app never saw that request."""
        self._metrics.count_refusal(error)
        logger.info("refused: %d %s: %s", error.status, error.code, error.message)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Replaces uvicorn's, whose listener is closed with the connections that wait in it."""
        assert sockets, "the port is open before the server starts"
        self.servers: list[asyncio.Server] = []
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(1)  # the app has logged the reason
        [listener] = sockets
        self._acceptor = Acceptor(
            listener,
            self._make_protocol,
            lambda: len(self.server_state.connections),
            self._connections,
            max_connections(),
        )
        self.started = True

    def _make_protocol(self) -> asyncio.Protocol:
        protocol = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        return protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second. Returns whether the server ends."""
        self._acceptor.count()  # otherwise other processes count this one as stuck
        has_failed = self._engine.state is State.FAILED
        if self._leaves_at is None and (self._told_to_stop or has_failed):
            self._engine.leave()
            # A server that accepts no requests needs no delay.
            delay_s = self._delay_s if self._engine.state is State.LEAVING else 0.0
            if self._logs_lifecycle:
                logger.info("stopping, in at most %g s", delay_s + self._grace_s)
            self._leaves_at = time.monotonic() + delay_s
        if self._deadline is None and self._is_time_to_drain(has_failed):
            self._engine.drain()
            self._deadline = time.monotonic() + self._grace_s
        return await super().on_tick(counter) or self._is_drained()

    def _is_time_to_drain(self, has_failed: bool) -> bool:
        return self._leaves_at is not None and (has_failed or time.monotonic() >= self._leaves_at)

    def _is_drained(self) -> bool:
        return self._deadline is not None and (self._engine.is_idle or time.monotonic() >= self._deadline)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Replaces uvicorn's shutdown, which would add a grace of its own, in whole seconds."""
        assert self._deadline is not None, "nothing but a drain ends the server"
        await self._acceptor.stop()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        while (state.connections or state.tasks) and time.monotonic() < self._deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        if state.tasks:
            logger.warning("the grace is over: requests cut off: %d", len(state.tasks))
            cut_off = list(state.tasks)
            for task in cut_off:
                task.cancel()
            await asyncio.wait(cut_off, timeout=_FAREWELL_S)
        await self.lifespan.shutdown()


def run(settings: Settings, listener: socket.socket) -> NoReturn:
    """Serves until a signal comes or the device fails, then exits with 0, or with 1 if the device failed."""
    trust_own_limits()
    app = create_app(settings)
    Server(app, settings).run([listener])
    logger.info("stopped")
    finish(app.state.engine)


def trust_own_limits() -> None:
    """Silences Pillow's warning about large images, as `max_image_pixels` is the limit here."""
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def finish(engine: Engine) -> NoReturn:
    """Ends the process, which a thread that still loads, decodes or waits for a device would keep alive."""
    end_process(1 if engine.state is State.FAILED else 0)

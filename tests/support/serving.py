"""The app with fake encoders behind real sockets: our server in a thread of this process."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import threading
from collections.abc import Sequence

import numpy as np
import uvloop
from prometheus_client import CollectorRegistry

from models import ReplicaGroup
from service.__main__ import listen
from service.app import create_app
from service.config.settings import Settings
from service.engine.engine import Engine, State
from service.metrics import render
from service.queue.ticket import Ticket
from service.server import Server
from tests.support.app import HIDDEN_SIZE, FakeEncoder, fake_replicas
from tests.support.traffic import Answer, Scrape, call, png, post
from tests.support.waiting import eventually

PLAIN = "?normalize=false"  # the fake encoder's normalized vectors are all the same


class HeldUpload:
    """A request whose body does not end. The server waits for it until it leaves."""

    def __init__(self, port: int) -> None:
        request = request_of(1)
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self._socket.sendall(request[: request.index(b"\r\n\r\n") + 20])

    def leave(self) -> None:
        self._socket.close()


class Served:
    """A server with its port open. Its model is loaded once `wait_for(State.READY)` returns."""

    def __init__(self, settings: Settings, *encoders: FakeEncoder) -> None:
        self.encoders = encoders
        self._registry = CollectorRegistry()
        self.replicas = fake_replicas(*encoders).replicas
        self._app = create_app(
            settings, registry=self._registry, start_replicas=lambda settings: ReplicaGroup(self.replicas)
        )
        self.engine: Engine = self._app.state.engine
        self._server = Server(self._app, settings)
        self._listener = listen("127.0.0.1", 0)
        self.port: int = self._listener.getsockname()[1]
        self.left_tasks: set[asyncio.Task[object]] | None = None  # once the server has ended
        self._told_to_stop = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        await self._server.serve([self._listener])
        await asyncio.sleep(0)  # lets cancelled tasks end
        self.left_tasks = asyncio.all_tasks() - {asyncio.current_task()}

    def wait_for(self, state: State) -> None:
        eventually(lambda: self.engine.state is state)

    def stop(self) -> None:
        """Stops the server as a first signal would. A second signal would end the tests."""
        if not self._told_to_stop:
            self._told_to_stop = True
            self._server.handle_exit(signal.SIGTERM, None)

    def wait_for_the_end(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server goes on"
        assert self.left_tasks == set()

    def scrape(self) -> Scrape:
        return Scrape(render(self._registry, None)[0].decode())

    def wait_until_in_flight(self, number: int) -> None:
        """So many requests are being answered, and have been read."""
        eventually(lambda: self.engine.num_accepted == number)

    def wait_until_queued(self, num_images: int) -> None:
        eventually(lambda: self.engine.batcher.waiting_images == num_images)

    def check_settled(self, num_sent: int) -> dict[int, int]:
        """Checks that each request was counted once and left nothing behind. Returns counts by status."""
        eventually(lambda: sum(self.scrape().statuses().values()) >= num_sent)
        eventually(lambda: self.engine.is_idle)
        scrape = self.scrape()
        scrape.check_at_rest()
        assert scrape.total("requests_in_flight") == 0
        statuses = scrape.statuses()
        assert sum(statuses.values()) == num_sent
        self._check_no_ticket_is_left()
        if self.engine.state is not State.FAILED:
            asyncio.run(self._take_all_room())
        return statuses

    async def _take_all_room(self) -> None:
        ticket = Ticket()
        self.engine.batcher.reserve(ticket, self.engine.batcher.limit_tokens)
        self.engine.batcher.cancel(ticket)

    def _check_no_ticket_is_left(self) -> None:
        def is_none_left() -> bool:
            gc.collect()
            return not any(type(thing) is Ticket for thing in gc.get_objects())

        eventually(is_none_left)


def gray(level: int, height: int = 64, width: int = 64) -> bytes:
    """An image that its embedding identifies."""
    return png(np.full((height, width, 3), level, dtype=np.uint8))


def request_of(*levels: int) -> bytes:
    """A request for gray images of these levels, of various sizes."""
    return post(*(gray(level, 32 + 32 * (level % 3), 32 + level % 90) for level in levels), query=PLAIN)


def embeddings_of(*levels: int) -> list[list[float]]:
    """The embeddings of such a request."""
    return [[float(level * (column + 1)) for column in range(HIDDEN_SIZE)] for level in levels]


async def call_all(port: int, requests: Sequence[Sequence[int]]) -> list[Answer]:
    """Sends requests for gray images concurrently."""
    return list(await asyncio.gather(*(call(port, request_of(*levels)) for levels in requests)))

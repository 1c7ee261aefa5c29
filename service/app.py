"""`create_app` puts the rooms together; `_lifespan` starts and stops their threads and tasks.

    RequestMiddleware ─► KeyMiddleware ─► EarlyRefusalMiddleware ─► route: accepted by the engine ─► Pipeline

Starting the app only starts the replicas' threads, so the port may be open before the model is loaded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException

from service.chat.door import ChatDoor
from service.chat.llm_client import LlmClient
from service.config.settings import Settings
from service.config.version import find_version
from service.embedder import Embedder
from service.engine.engine import Engine
from service.engine.interfaces import HasReplicas
from service.engine.replicas import load_replicas
from service.fetching.fetcher import Fetcher, make_fetcher
from service.handoff.store import TokenStore
from service.http.early_refusal import EarlyRefusalMiddleware
from service.http.keys import KeyMiddleware
from service.http.middleware import RequestMiddleware, raise_api_error
from service.images.decoding_memory import DecodingMemory
from service.images.image_file import ImageLimits
from service.images.preparation import PreparationResources
from service.intake.byte_budget import ByteBudget
from service.metrics import Collects, Metrics
from service.page import page
from service.pipeline import Pipeline
from service.queue.queue_records import QueueLimits
from service.queue.tally import OwnTally, Tally
from service.routes import docs, embed, embeddings, handoff, info, llm, metrics, probes
from service.routes.route import RawRoute

logger = logging.getLogger(__name__)

OPEN_PATHS = (*probes.PATHS, metrics.PATH, *docs.PATHS, *page.PATHS)  # these need no API key

_NUM_WRITERS = 2  # threads for large bodies and answers; more would only wait for the interpreter lock

_DESCRIPTION = """Image embeddings from the vision transformer of a Qwen3-VL checkpoint.

    curl --data-binary @photo.jpg -H 'Content-Type: image/jpeg' http://localhost:8080/embed
"""
_BRACES = str.maketrans("", "", "{}")
_DEMO = "\n**This server runs the demo model: its weights are random and its embeddings mean nothing.**\n"


@dataclass(frozen=True)
class SharedProcessState:
    """The state that several processes share if they serve as one."""

    reserved_tokens: Tally
    held_bytes: Tally
    gather: Callable[[], Awaitable[Collects]]  # the metrics of all processes
    started_at: int  # seconds since 1970
    num_servers: int
    is_first: bool = True  # of the servers; one of them shows what all share
    owns_devices: bool = True  # only the owner of the devices sees their progress and watches them


def create_app(
    settings: Settings,
    *,
    registry: CollectorRegistry | None = None,
    start_replicas: Callable[[Settings], HasReplicas] = load_replicas,
    start_fetcher: Callable[[Settings], Fetcher] = make_fetcher,
    shared: SharedProcessState | None = None,
) -> FastAPI:
    """Creates the app, with its engine as `app.state.engine` and its metrics as `app.state.metrics`.

    Metrics are registered with `registry`, by default a new one. `start_replicas` returns replicas that are
    loading, by default of the model in the settings. `start_fetcher` returns the fetcher of image URLs, which
    the app closes. `shared` is for one of several processes that serve as one.
    """
    if registry is None:
        registry = CollectorRegistry()
    shared = shared or _alone(registry)
    own_version = find_version()
    counters = Metrics(registry, counted_routes(settings))
    engine = Engine(
        partial(start_replicas, settings),
        QueueLimits(settings.max_batch_tokens, settings.max_queue_tokens, settings.max_wait_ms / 1e3),
        counters,
        model_name=settings.served_name,
        version=own_version,
        reserved=shared.reserved_tokens,
        owns_devices=shared.owns_devices,
    )
    budget = ByteBudget(settings.max_inflight_bytes, shared.held_bytes)
    counters.watch_queue(engine.batcher, budget)
    decoders = ThreadPoolExecutor(settings.decode_threads, thread_name_prefix="decode")
    writers = ThreadPoolExecutor(_NUM_WRITERS, thread_name_prefix="write")
    fetcher = start_fetcher(settings)
    limits = ImageLimits(settings.max_image_bytes, settings.max_image_pixels)
    memory = DecodingMemory.share(shared.num_servers, limits.max_decoding_bytes)
    resources = PreparationResources(engine.batcher, decoders, limits, settings.max_request_tokens, memory)
    store = _open_store(settings, counters, shared)
    embedder = Embedder(settings, engine, resources, writers, store, counters)
    pipeline = Pipeline(settings, engine, budget, writers, fetcher, embedder, store)
    door = _open_door(settings, pipeline, budget, counters)
    app = FastAPI(
        title="vision-sidecar",
        version=own_version,
        servers=[{"url": docs.SERVER, "description": "this server"}],
        description=_DESCRIPTION + (_DEMO if settings.is_demo else ""),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=_operation_id,
        lifespan=partial(_lifespan, settings, engine, (decoders, writers), fetcher, door),
    )
    app.state.engine = engine
    app.state.metrics = counters
    _add_middleware(app, settings, engine, counters)
    _add_routes(app, settings, engine, pipeline, door, shared)
    if store is not None:
        handoff.add_routes(app.router, store, counters, writers)
    return app


def counted_routes(settings: Settings) -> tuple[str, ...]:
    """The templates of all routes but the probes, as metrics name them."""
    handed_over = (handoff.PATH,) if settings.handoff_dir else ()
    of_llm = llm.PATHS if settings.llm_url else ()
    of_page = page.ROUTES if settings.page else ()
    return (
        *(embed.PATH, embeddings.PATH, *handed_over, *of_llm, *info.PATHS, metrics.PATH),
        *docs.PATHS,
        *of_page,
    )


def _open_store(settings: Settings, counters: Metrics, shared: SharedProcessState) -> TokenStore | None:
    """The store of tokens. `open_folder` has taken its folder for this server."""
    if settings.handoff_dir is None:
        return None
    store = TokenStore(settings.handoff_dir, settings.handoff_lease_s, counters)
    if shared.is_first:
        counters.watch_store(store)
    return store


def _open_door(
    settings: Settings, pipeline: Pipeline, budget: ByteBudget, counters: Metrics
) -> ChatDoor | None:
    """The door to the LLM server, if there is one."""
    if settings.llm_url is None:
        return None
    key = settings.llm_api_key
    llm_client = LlmClient(
        settings.llm_url, settings.llm_timeout_s, None if key is None else key.get_secret_value()
    )
    # A client's key is for this server if there are keys here. Else it is for the LLM server.
    passes_authorization = key is None and not settings.accepted_keys
    return ChatDoor(pipeline, llm_client, budget, counters, passes_authorization=passes_authorization)


def _add_middleware(app: FastAPI, settings: Settings, engine: Engine, counters: Metrics) -> None:
    """Adds the middleware, the innermost first."""
    # Chats without images need no room in the queue.
    embedding_paths = (embed.PATH,) if settings.llm_url else (embed.PATH, embeddings.PATH)
    app.add_middleware(EarlyRefusalMiddleware, paths=embedding_paths, check=engine.check_room)
    keys = [key.get_secret_value() for key in settings.accepted_keys]
    if keys:
        app.add_middleware(KeyMiddleware, keys=keys, open_paths=OPEN_PATHS)
    app.add_middleware(
        RequestMiddleware,
        metrics=counters,
        probes=frozenset(probes.PATHS),
        cors_origins=settings.cors_allow_origins,
    )
    app.add_exception_handler(HTTPException, raise_api_error)


def _add_routes(
    app: FastAPI,
    settings: Settings,
    engine: Engine,
    pipeline: Pipeline,
    door: ChatDoor | None,
    shared: SharedProcessState,
) -> None:
    router = app.router
    router.route_class = RawRoute
    embed.add_routes(router, engine, pipeline)
    embeddings.add_routes(router, engine, pipeline, door)
    if door is not None:
        llm.add_routes(router, engine, door)
    probes.add_routes(router, engine)
    info.add_routes(router, settings, engine, app.version, started_at=shared.started_at)
    metrics.add_routes(router, shared.gather)
    # The last ones, as they describe the others.
    if settings.page:
        page.add_routes(router)
    docs.add_routes(router, app, needs_key=bool(settings.accepted_keys), open_paths=OPEN_PATHS)


def _alone(registry: CollectorRegistry) -> SharedProcessState:
    async def gather() -> Collects:
        return registry

    return SharedProcessState(OwnTally(), OwnTally(), gather, int(time.time()), num_servers=1)


@asynccontextmanager
async def _lifespan(
    settings: Settings,
    engine: Engine,
    executors: Sequence[ThreadPoolExecutor],
    fetcher: Fetcher,
    door: ChatDoor | None,
    app: FastAPI,
) -> AsyncIterator[None]:
    if settings.is_demo:
        logger.warning("model demo: the weights are random, so the embeddings mean nothing")
    engine.start()
    watching = asyncio.create_task(engine.watch(settings.device_timeout_s))
    watching.add_done_callback(engine.on_watch_ended)
    yield
    watching.cancel()
    await asyncio.wait([watching])
    engine.drain()
    await fetcher.aclose()
    if door is not None:
        await door.aclose()
    if not engine.close():
        logger.warning("a device is loading, busy or lost; the process ends without it")
    for executor in executors:
        executor.shutdown(wait=False, cancel_futures=True)


def _operation_id(route: APIRoute) -> str:
    """The id of a path in OpenAPI, such as `v1_models` for `/v1/models`."""
    return route.path_format.strip("/").replace("/", "_").translate(_BRACES)

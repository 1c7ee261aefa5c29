"""The map of one request for embeddings, from its head to the bytes of its answer.

    head checked ─► body read ─► URLs fetched ─► embedded (`service/embedder.py`) ─► serialized

`Pipeline._answer` is that map, one line a step. Knows the order of the steps and the threads that they run
in; how a step is done stands in its own room.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from typing import TypeVar, TypeVarTuple

from fastapi import Request

from service.answers.answer import Answer, ModelIdentity
from service.answers.answer_options import AnswerOptions
from service.answers.dtypes import dtype_name
from service.answers.serialize import serialize
from service.config.settings import Settings
from service.embedder import Embedder, HasEncoder
from service.errors import BadRequest, BodyTimeout, DeadlineExceeded
from service.fetching.fetcher import Fetcher
from service.handoff.answer import handoff_answer
from service.handoff.entry import Entry
from service.handoff.leases import renewed_leases
from service.handoff.store import TokenStore
from service.handoff.vector_cache import EmbeddedImage
from service.http.context import RequestContext, context_of
from service.intake.body import read_body
from service.intake.byte_budget import ByteBudget, Permit
from service.intake.embed_body import BodyLimits, BodyReader, Images
from service.intake.intake import Intake, embed_intake, openai_intake
from service.intake.openai_body import ServedModel
from service.intake.request_head import RequestHead, parse_head

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Checks the head of a request as its route needs it.
MakeIntake = Callable[[RequestHead, BodyLimits], Intake]

# Up to this many numbers are serialized in about a millisecond. A hop to another thread may take longer.
_INLINE_NUMBERS = 32_768


class Pipeline:
    """Answers requests for embeddings. The event loop parses, waits, and serializes small answers.

    Large bodies are parsed and large answers serialized on `writers`, where they do not wait behind images.
    """

    def __init__(
        self,
        settings: Settings,
        source: HasEncoder,
        budget: ByteBudget,
        writers: Executor,
        fetcher: Fetcher,
        embedder: Embedder,
        store: TokenStore | None,
    ) -> None:
        """Without a `store`, tokens are not handed over."""
        self._source = source
        self._budget = budget
        self._writers = writers
        self._fetcher = fetcher
        self._embedder = embedder
        self._store = store
        self._model_name = settings.served_name
        self._timeout_s = settings.request_timeout_s
        self.body_limits = BodyLimits(
            max_body_bytes=settings.max_body_bytes,
            max_image_bytes=settings.max_image_bytes,
            max_images=settings.max_images_per_request,
            timeout_s=settings.body_timeout_s,
        )

    async def embed(self, request: Request) -> Answer:
        """Answers `/embed`. Raises `ApiError`, or `ClientDisconnect` once the caller has left."""
        return await self._answer(request, embed_intake)

    async def embed_openai(self, request: Request) -> Answer:
        """Answers `/v1/embeddings`. Raises as `embed` does."""
        served = ServedModel(self._model_name, self._source.encoder.hidden_size)
        return await self._answer(request, partial(openai_intake, served=served))

    async def _answer(self, request: Request, make_intake: MakeIntake) -> Answer:
        """One request, from its head to its answer."""
        context = context_of(request.scope)
        async with self.time_limit(context):
            head = parse_head(request.headers, request.scope["query_string"])
            intake = make_intake(head, self.body_limits)
            with self._budget.permit(intake.num_bytes) as permit:
                images, options = await self._read(intake, request, permit, context)
                store = self._store_for(options)
                files = await self._fetch(images, permit, context)
                if store is not None:
                    entries = await self._embedder.hand_over(store, files, request, context)
                    return handoff_answer(self._identity, dtype_name(self._source.encoder.dtype), entries)
                embedded = await self._embedder.embed(files, options, request, context)
                return await self._serialize(embedded, options, context)

    @asynccontextmanager
    async def time_limit(self, context: RequestContext) -> AsyncIterator[None]:
        """Raises `BodyTimeout` or `DeadlineExceeded` `request_timeout_s` after the request began."""
        try:
            async with asyncio.timeout(self._timeout_s - context.duration_s) as timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            if not context.body_has_arrived:
                raise BodyTimeout(f"the body did not arrive within {self._timeout_s:g} s") from None
            raise DeadlineExceeded from None

    async def _read(
        self, intake: Intake, request: Request, permit: Permit, context: RequestContext
    ) -> tuple[Images, AnswerOptions]:
        with context.stage("read"):
            return await intake.read(_permitted(request.stream(), permit, context), self.run_blocking)

    async def read(
        self, reader: BodyReader[T], request: Request, permit: Permit, context: RequestContext
    ) -> T:
        """Reads a body that is not one of `/embed`. Raises as `read_body` does."""
        with context.stage("read"):
            chunks = _permitted(request.stream(), permit, context)
            return await read_body(reader, chunks, self.body_limits, self.run_blocking)

    async def hand_over(
        self, images: Images, request: Request, permit: Permit, context: RequestContext
    ) -> Sequence[Entry]:
        """The entries of the images, leased, with their tokens in the store. Raises as `embed` does."""
        assert self._store is not None, "the settings ask for a store"
        files = await self._fetch(images, permit, context)
        return await self._embedder.hand_over(self._store, files, request, context)

    def renewed_leases(self, entries: Sequence[Entry]) -> AbstractContextManager[Callable[[], object]]:
        """See `service.handoff.leases`."""
        return renewed_leases(self._store, entries)

    def _store_for(self, options: AnswerOptions) -> TokenStore | None:
        """The store if the tokens are handed over. Raises `BadRequest` if there is no store."""
        if options.format != "handoff":
            return None
        if self._store is None:
            raise BadRequest(
                "format=handoff needs a server with --handoff-dir", code="invalid_option", param="format"
            )
        return self._store

    async def _fetch(self, images: Images, permit: Permit, context: RequestContext) -> Sequence[bytes]:
        """The files of all images. Only requests with URLs come to the fetcher."""
        files = [image for image in images if isinstance(image, bytes)]
        if len(files) == len(images):
            return files
        with context.stage("fetch"):
            return await self._fetcher.fetch(images, permit.add)

    @property
    def _identity(self) -> ModelIdentity:
        encoder = self._source.encoder
        return ModelIdentity(self._model_name, encoder.revision, encoder.fingerprint)

    async def _serialize(
        self, embedded: Sequence[EmbeddedImage], options: AnswerOptions, context: RequestContext
    ) -> Answer:
        facts, embeddings = zip(*((image.facts, image.embedding) for image in embedded), strict=True)
        with context.stage("serialize"):
            if sum(embedding.numel() for embedding in embeddings) <= _INLINE_NUMBERS:
                return serialize(self._identity, options, facts, embeddings)
            return await self.run_blocking(serialize, self._identity, options, facts, embeddings)

    async def run_blocking(self, function: Callable[[*Ts], T], /, *args: *Ts) -> T:
        """Runs a function off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._writers, function, *args)


async def _permitted(
    chunks: AsyncIterator[bytes], permit: Permit, context: RequestContext
) -> AsyncIterator[bytes]:
    """Adds each chunk of a body to the permit, which may refuse it, and notes when the body has arrived."""
    async for chunk in chunks:
        permit.add(len(chunk))
        yield chunk
    context.body_has_arrived = True

"""The map of one request for embeddings, from its bytes to those of the answer.

    read ─► options ─► URLs fetched ─► headers checked ─► decoded and resized ─► queued ─► encoded
      ─► serialized

Knows the order of the steps and where each runs. What a step does stands in its own module.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Protocol, TypeVar, TypeVarTuple

import torch
from fastapi import Request
from starlette.requests import ClientDisconnect

from service.answers.answer import Answer, ImageFacts, ModelIdentity
from service.answers.answer_options import AnswerOptions
from service.answers.serialize import serialize
from service.config.settings import Settings
from service.engine.interfaces import LoadedEncoder
from service.errors import BodyTimeout, DeadlineExceeded, UnsupportedMedia
from service.fetching.fetcher import Fetcher
from service.fetching.image_urls import ImageUrl
from service.http.caller import watch
from service.http.context import RequestContext, context_of
from service.images.decoding_memory import DecodingMemory
from service.images.image_file import ImageLimits
from service.images.preparation import Preparation, PreparationResources
from service.intake.body import announced_bytes, read_embed_body, read_openai_body, takes_options
from service.intake.byte_budget import ByteBudget, Permit
from service.intake.content_type import ContentType, parse_content_type
from service.intake.embed_body import BodyLimits, EmbedBody, ReadBody
from service.intake.openai_body import ServedModel
from service.intake.options import check_options, openai_options, read_query, resolve_options
from service.queue.batcher import Batcher
from service.queue.ticket import Abandoned, Ticket

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Fewer numbers than this are written in about a millisecond, less than a hop to another thread may wait.
_INLINE_NUMBERS = 32_768


class HasEncoder(Protocol):
    """Where the facts of the loaded encoder come from."""

    @property
    def encoder(self) -> LoadedEncoder: ...


class Pipeline:
    """Answers requests; the event loop parses and waits.

    Images are decoded on `decoders`. Large bodies are parsed and large answers written on `writers`, where
    they do not wait behind images.
    """

    def __init__(
        self,
        settings: Settings,
        source: HasEncoder,
        batcher: Batcher,
        budget: ByteBudget,
        decoders: Executor,
        writers: Executor,
        fetcher: Fetcher,
        limits: ImageLimits,
        memory: DecodingMemory,
    ) -> None:
        self._source = source
        self._batcher = batcher
        self._budget = budget
        self._writers = writers
        self._fetcher = fetcher
        self._model_name = settings.served_name
        self._timeout_s = settings.request_timeout_s
        self._preparation = PreparationResources(
            batcher,
            decoders,
            limits,
            settings.max_request_tokens,
            memory,
        )
        self._body_limits = BodyLimits(
            max_body_bytes=settings.max_body_bytes,
            max_image_bytes=settings.max_image_bytes,
            max_images=settings.max_images_per_request,
            timeout_s=settings.body_timeout_s,
        )

    async def embed(self, request: Request) -> Answer:
        """Answers `/embed`. Raises `ApiError`, or `ClientDisconnect` once the caller has left."""
        return await self._bounded(request, self._embed)

    async def embed_openai(self, request: Request) -> Answer:
        """Answers `/v1/embeddings`. Raises as `embed` does."""
        return await self._bounded(request, self._embed_openai)

    async def _bounded(
        self, request: Request, answer: Callable[[Request, RequestContext, Permit], Awaitable[Answer]]
    ) -> Answer:
        """Within the limits on time and on the bytes of all bodies."""
        context = context_of(request.scope)
        rest_s = context.started_at + self._timeout_s - time.perf_counter()
        try:
            async with asyncio.timeout(rest_s) as timeout:
                with self._budget.permit(self._announced_bytes(request)) as permit:
                    return await answer(request, context, permit)
        except TimeoutError:
            if not timeout.expired():
                raise
            if not context.body_has_arrived:
                raise BodyTimeout(f"the body did not arrive within {self._timeout_s:g} s") from None
            raise DeadlineExceeded from None

    def _announced_bytes(self, request: Request) -> int:
        """What the body says that it has; 0 where it does not say, or says what will be refused."""
        num_bytes = announced_bytes(request.headers.get("content-length", "")) or 0
        return num_bytes if num_bytes <= self._body_limits.max_body_bytes else 0

    async def _embed(self, request: Request, context: RequestContext, permit: Permit) -> Answer:
        query = read_query(request.scope["query_string"])
        content_type = parse_content_type(request.headers.get("content-type"))
        if takes_options(content_type):
            check_options(query)
        else:
            resolve_options(query, _accept(request))  # refuses what would be refused after the body
        body = await self._read(request, content_type, context, permit, read_embed_body)
        options = resolve_options({**body.options, **query}, _accept(request))
        return await self._answer(request, body, options, context, permit)

    async def _embed_openai(self, request: Request, context: RequestContext, permit: Permit) -> Answer:
        served = ServedModel(self._model_name, self._source.encoder.hidden_size)
        content_type = parse_content_type(request.headers.get("content-type"))
        read = partial(read_openai_body, served=served)
        body = await self._read(request, content_type, context, permit, read)
        options = openai_options(body.options, _accept(request))
        return await self._answer(request, body, options, context, permit)

    async def _answer(
        self,
        request: Request,
        body: EmbedBody,
        options: AnswerOptions,
        context: RequestContext,
        permit: Permit,
    ) -> Answer:
        facts, embeddings = await self._encode(request, body.images, options, context, permit)
        return await self._serialize(facts, options, embeddings, context)

    async def _read(
        self,
        request: Request,
        content_type: ContentType | None,
        context: RequestContext,
        permit: Permit,
        read: ReadBody,
    ) -> EmbedBody:
        started = time.perf_counter()
        headers = request.headers
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise UnsupportedMedia(
                "a compressed body is not served; send it without Content-Encoding",
                code="unsupported_content_type",
            )
        body = await read(
            content_type,
            headers.get("content-length"),
            _covered(request.stream(), permit, context),
            self._body_limits,
            self._run,
        )
        context.stages_s["read"] = time.perf_counter() - started
        return body

    async def _fetch(
        self, images: Sequence[bytes | ImageUrl], context: RequestContext, permit: Permit
    ) -> list[bytes]:
        started = time.perf_counter()
        files = await self._fetcher.fetch(images, permit.add)
        if any(isinstance(image, ImageUrl) for image in images):
            context.stages_s["fetch"] = time.perf_counter() - started
        return files

    async def _encode(
        self,
        request: Request,
        images: Sequence[bytes | ImageUrl],
        options: AnswerOptions,
        context: RequestContext,
        permit: Permit,
    ) -> tuple[Sequence[ImageFacts], Sequence[torch.Tensor]]:
        """Fetches, decodes, queues and encodes: the ticket is at one of these steps until it ends."""
        ticket = Ticket(context.started_at + self._timeout_s)
        with watch(request.receive, lambda: self._batcher.leave(ticket)):
            files = await self._fetch(images, context, permit)
            started = time.perf_counter()
            preparation = Preparation(self._preparation, files, options, ticket, self._source.encoder)
            del files
            try:
                preparation.start()
                embeddings = await ticket.embeddings()
            except Abandoned:
                raise ClientDisconnect from None
            finally:
                self._batcher.leave(ticket)
                preparation.drop()
                context.stages_s.update(ticket.stages_s(started))
        return preparation.facts, embeddings

    async def _serialize(
        self,
        facts: Sequence[ImageFacts],
        options: AnswerOptions,
        embeddings: Sequence[torch.Tensor],
        context: RequestContext,
    ) -> Answer:
        started = time.perf_counter()
        encoder = self._source.encoder
        model = ModelIdentity(self._model_name, encoder.revision, encoder.fingerprint)
        if sum(embedding.numel() for embedding in embeddings) <= _INLINE_NUMBERS:
            answer = serialize(model, options, facts, embeddings)
        else:
            answer = await self._run(serialize, model, options, facts, embeddings)
        context.stages_s["serialize"] = time.perf_counter() - started
        return answer

    async def _run(self, function: Callable[[*Ts], T], /, *args: *Ts) -> T:
        """Runs a blocking function off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._writers, function, *args)


async def _covered(
    chunks: AsyncIterator[bytes], permit: Permit, context: RequestContext
) -> AsyncIterator[bytes]:
    """The chunks of a body, each with room for it. Says in the context when the last one was there."""
    async for chunk in chunks:
        permit.add(len(chunk))
        yield chunk
    context.body_has_arrived = True


def _accept(request: Request) -> str | None:
    """The Accept header, which may come in several lines."""
    return ", ".join(request.headers.getlist("accept")) or None

"""From image files to embeddings or entries of the store, each computed once.

    hashed ─► kept? ─► the kept result
                └──► decoded ─► queued ─► encoded ─► kept

Knows the order of these steps; how a step is done stands in its own room.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Protocol, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from service.answers.answer import ImageFacts
from service.answers.answer_options import AnswerOptions
from service.answers.arrays import check_finite
from service.answers.as_vllm import image_uuid
from service.answers.dtypes import dtype_name
from service.config.settings import Settings
from service.engine.interfaces import LoadedEncoder
from service.errors import renumbered
from service.handoff.entry import Entry
from service.handoff.single_flight import SingleFlight
from service.handoff.store import TokenStore
from service.handoff.token_file import TokenFile, file_bytes
from service.handoff.vector_cache import EmbeddedImage, VectorCache, VectorKey
from service.http.caller import watch_caller
from service.http.context import RequestContext
from service.images.preparation import Destination, HashedImage, Preparation, PreparationResources
from service.metrics import CacheKind, Metrics
from service.queue.ticket import Abandoned, Ticket

K = TypeVar("K", bound=Hashable)

# Hashing this many bytes takes no longer than a hop to another thread.
_INLINE_BYTES = 2**17
_HANDED_OVER = AnswerOptions(
    pooling="none", normalize=False, deepstack=True, dtype=None, encoding_format=None, format="handoff"
)


class HasEncoder(Protocol):
    """Knows the loaded encoder, for its facts such as the width of a token."""

    @property
    def encoder(self) -> LoadedEncoder: ...


class Embedder:
    """Embeds the images of requests. Large files are hashed on `hashers`, off the event loop."""

    def __init__(
        self,
        settings: Settings,
        source: HasEncoder,
        resources: PreparationResources,
        hashers: Executor,
        store: TokenStore | None,
        metrics: Metrics,
    ) -> None:
        self._source = source
        self._resources = resources
        self._batcher = resources.batcher
        self._hashers = hashers
        self._timeout_s = settings.request_timeout_s
        self._vectors = VectorCache(settings.cache_bytes) if settings.cache_bytes else None
        self._store = store
        self._metrics = metrics
        self._vector_flights: SingleFlight[VectorKey, EmbeddedImage] = SingleFlight()
        self._token_flights: SingleFlight[str, Entry] = SingleFlight()

    async def embed(
        self, files: Sequence[bytes], options: AnswerOptions, request: Request, context: RequestContext
    ) -> Sequence[EmbeddedImage]:
        """The images with their embeddings. Pooled vectors are kept.

        Raises `ApiError`, and `ClientDisconnect` once the caller has left.
        """
        images = await self._hashed(files)
        if self._vectors is None or options.pooling != "mean":
            return await self._compute(images, options, request, context)
        return await self._embed_once(self._vectors, images, options, request, context)

    async def _embed_once(
        self,
        cache: VectorCache,
        images: Sequence[HashedImage],
        options: AnswerOptions,
        request: Request,
        context: RequestContext,
    ) -> Sequence[EmbeddedImage]:
        output = options.output_spec()
        keys = [VectorKey(image.sha256, output) for image in images]
        indices = _first_indices(keys)
        num_computed = 0

        async def compute(missing: Sequence[VectorKey]) -> Mapping[VectorKey, EmbeddedImage]:
            nonlocal num_computed
            chosen = [indices[key] for key in missing]
            with renumbered(chosen):
                found = await self._compute([images[i] for i in chosen], options, request, context)
                for index, image in enumerate(found):
                    check_finite(image.embedding, index)
            num_computed += len(found)
            for key, image in zip(missing, found, strict=True):
                cache.put(key, image)
            return dict(zip(missing, found, strict=True))

        encoder = self._source.encoder
        options.check_size(
            num_images=len(images), num_tokens=0, hidden_size=encoder.hidden_size, width=encoder.width
        )
        results = await self._vector_flights.results(keys, cache.find, compute)
        self._count("vector", len(images), num_computed, context)
        return [results[key] for key in keys]

    async def hand_over(
        self, store: TokenStore, files: Sequence[bytes], request: Request, context: RequestContext
    ) -> Sequence[Entry]:
        """The entries of the images, leased, with their tokens written. Raises as `embed` does."""
        encoder = self._source.encoder
        dtype = dtype_name(encoder.dtype)
        images = await self._hashed(files)
        uuids = [image_uuid(encoder.fingerprint, image.sha256, dtype) for image in images]
        indices = _first_indices(uuids)
        num_computed = 0

        async def compute(missing: Sequence[str]) -> Mapping[str, Entry]:
            nonlocal num_computed
            claimed = [uuid for uuid in missing if store.claim(uuid)]
            if not claimed:
                await store.wait(missing)
            try:
                absent = [uuid for uuid in claimed if store.find(uuid) is None]
                chosen = [indices[uuid] for uuid in absent]
                with renumbered(chosen):
                    await self._write([images[i] for i in chosen], store, absent, request, context)
                num_computed += len(absent)
            finally:
                for uuid in claimed:
                    store.release(uuid)
            return {}  # they are found in the store

        results = await self._token_flights.results(uuids, store.find, compute)
        self._count("tokens", len(images), num_computed, context)
        return [results[uuid] for uuid in uuids]

    async def _write(
        self,
        images: Sequence[HashedImage],
        store: TokenStore,
        uuids: Sequence[str],
        request: Request,
        context: RequestContext,
    ) -> None:
        """Has the tokens of images written to the entries that are claimed for them."""
        if not images:
            return
        destination = _Entries(store, uuids, self._source.encoder)
        found = await self._compute(images, _HANDED_OVER, request, context, destination)
        for index, image in enumerate(found):
            check_finite(image.embedding, index)

    async def _compute(
        self,
        images: Sequence[HashedImage],
        options: AnswerOptions,
        request: Request,
        context: RequestContext,
        destination: Destination | None = None,
    ) -> Sequence[EmbeddedImage]:
        """Has the images decoded, queued and encoded, and waits for their embeddings."""
        started_at = time.perf_counter()
        with self._ticket(request, context) as ticket:
            preparation = Preparation(
                self._resources, images, options, ticket, self._source.encoder, destination
            )
            try:
                preparation.start()
                embeddings = await ticket.embeddings()
            except Abandoned:
                raise ClientDisconnect from None
            finally:
                self._batcher.cancel(ticket)
                preparation.drop()
                context.stages_s.update(ticket.stages_s(started_at))
        return [EmbeddedImage(*pair) for pair in zip(preparation.facts, embeddings, strict=True)]

    @contextmanager
    def _ticket(self, request: Request, context: RequestContext) -> Iterator[Ticket]:
        """A ticket of the request, which is cancelled once the caller leaves."""
        ticket = Ticket(context.started_at + self._timeout_s)
        with watch_caller(request.receive, lambda: self._batcher.cancel(ticket)):
            yield ticket

    async def _hashed(self, files: Sequence[bytes]) -> Sequence[HashedImage]:
        if sum(map(len, files)) <= _INLINE_BYTES:
            return _hash_all(files)
        return await asyncio.get_running_loop().run_in_executor(self._hashers, _hash_all, files)

    def _count(self, kind: CacheKind, num_images: int, num_computed: int, context: RequestContext) -> None:
        self._metrics.observe_cache(kind, hits=num_images - num_computed, misses=num_computed)
        context.is_cached = not num_computed


class _Entries:
    """Entries of the store as the destination of images, in the same order."""

    def __init__(self, store: TokenStore, uuids: Sequence[str], encoder: LoadedEncoder) -> None:
        self._store = store
        self._uuids = uuids
        self._encoder = encoder

    def reserve(self, num_tokens: Sequence[int]) -> None:
        width, itemsize = self._encoder.width, self._encoder.dtype.itemsize
        sizes = [file_bytes(number, width, itemsize) for number in num_tokens]
        self._store.reserve(list(zip(self._uuids, sizes, strict=True)))

    def sink(self, index: int, facts: ImageFacts) -> TokenFile:
        store = self._store
        return TokenFile(
            str(store.folder), self._uuids[index], facts.grid_thw, self._encoder.fingerprint, store.lease_s
        )


def _first_indices(keys: Sequence[K]) -> dict[K, int]:
    """Where each key stands first."""
    indices: dict[K, int] = {}
    for index, key in enumerate(keys):
        indices.setdefault(key, index)
    return indices


def _hash_all(files: Sequence[bytes]) -> list[HashedImage]:
    return [HashedImage(file, hashlib.sha256(file).hexdigest()) for file in files]

"""The map of one request to `/embed`, from its bytes to those of the answer.

    read ─► options ─► URLs fetched ─► headers checked ─► decoded and resized ─► encoded ─► serialized

Knows the order of the steps and where each runs. What a step does stands in its own module.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar, TypeVarTuple

from fastapi import Request

from models import AspectRatioError, BatchResult, EncodeItem, Patches, VisionEncoder
from service.body import read_embed_body, takes_options
from service.caller import watch
from service.context import RequestContext, context_of
from service.embed_body import BodyLimits, EmbedBody, ImageUrl
from service.encoding import ImageFacts, ModelIdentity, encode_json
from service.errors import ApiError, BadRequest, TooLarge, UnsupportedMedia, image_param
from service.fetch import Fetcher
from service.images import ImageHeader, ImageLimits, read_header
from service.options import EmbedOptions, check_options, read_query, resolve_options
from service.settings import Settings

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Fewer numbers than this are written in about a millisecond, less than a hop to another thread may wait.
_INLINE_NUMBERS = 32_768


class SupportsEncode(Protocol):
    """Where embeddings come from: the loaded encoder's facts, and a call that takes images."""

    @property
    def encoder(self) -> VisionEncoder: ...

    def submit(self, items: Sequence[EncodeItem]) -> Future[BatchResult]: ...


@dataclass(frozen=True)
class PreparedImage:
    """One image, ready for the encoder, with what the answer says of it."""

    patches: Patches
    facts: ImageFacts


class Pipeline:
    """Answers requests. Heavy work runs on `executor`; the event loop parses and waits."""

    def __init__(
        self, settings: Settings, source: SupportsEncode, executor: Executor, fetcher: Fetcher
    ) -> None:
        self._source = source
        self._executor = executor
        self._fetcher = fetcher
        self._model_name = settings.served_name
        self._max_tokens = settings.max_request_tokens
        self._image_limits = ImageLimits(settings.max_image_bytes, settings.max_image_pixels)
        self._body_limits = BodyLimits(
            max_body_bytes=settings.max_body_bytes,
            max_image_bytes=settings.max_image_bytes,
            max_images=settings.max_images_per_request,
            timeout_s=settings.body_timeout_s,
        )

    async def embed(self, request: Request) -> bytes:
        """The JSON body of the answer. Raises `ApiError`, or `ClientDisconnect` once the caller has left."""
        context = context_of(request.scope)
        query = read_query(request.scope["query_string"])
        if takes_options(request.headers.get("content-type")):
            check_options(query)
        else:
            resolve_options(query, _accept(request))  # refuses what would be refused after the body
        body = await self._read(request, context)
        options = resolve_options({**body.options, **query}, _accept(request))
        with watch(request.receive) as caller:
            files = await self._fetch(body.images, context)
            caller.stop_if_left()
            images = await self._prepare(files, options, context)
            caller.stop_if_left()
            result = await self._encode(images, options, context)
            caller.stop_if_left()
        return await self._serialize(images, options, result, context)

    async def _read(self, request: Request, context: RequestContext) -> EmbedBody:
        started = time.perf_counter()
        headers = request.headers
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise UnsupportedMedia(
                "a compressed body is not served; send it without Content-Encoding",
                code="unsupported_content_type",
            )
        body = await read_embed_body(
            headers.get("content-type"),
            headers.get("content-length"),
            request.stream(),
            self._body_limits,
            self._run,
        )
        context.stages_s["read"] = time.perf_counter() - started
        return body

    async def _fetch(self, images: Sequence[bytes | ImageUrl], context: RequestContext) -> list[bytes]:
        started = time.perf_counter()
        files = await self._fetcher.fetch(images)
        if any(isinstance(image, ImageUrl) for image in images):
            context.stages_s["fetch"] = time.perf_counter() - started
        return files

    async def _prepare(
        self, images: Sequence[bytes], options: EmbedOptions, context: RequestContext
    ) -> list[PreparedImage]:
        started = time.perf_counter()
        if len(images) == 1:
            prepared = [await self._run(self._check_and_prepare, images[0], options)]
        else:
            headers = await self._run(self._check, images, options)
            prepared = await self._prepare_each(images, headers)
        context.stages_s["decode"] = time.perf_counter() - started
        return prepared

    def _check_and_prepare(self, image: bytes, options: EmbedOptions) -> PreparedImage:
        """Both steps of a single image in one hop to a thread."""
        [header] = self._check([image], options)
        return self._prepare_one(0, image, header)

    def _check(self, images: Sequence[bytes], options: EmbedOptions) -> list[ImageHeader]:
        """Headers of all images, every limit checked before any pixel is decoded."""
        encoder = self._source.encoder
        headers: list[ImageHeader] = []
        num_tokens = 0
        for index, image in enumerate(images):
            with _blaming(index):
                header = read_header(image, self._image_limits)
                num_tokens += encoder.preprocessor.num_tokens(header.height, header.width)
                if num_tokens > self._max_tokens:
                    raise TooLarge(
                        f"the images up to this one make {num_tokens} tokens, and a request may have "
                        f"{self._max_tokens}",
                        code="too_many_tokens",
                    )
            headers.append(header)
        options.check_size(
            num_images=len(images),
            num_tokens=num_tokens,
            hidden_size=encoder.hidden_size,
            width=encoder.width,
        )
        return headers

    async def _prepare_each(
        self, images: Sequence[bytes], headers: Sequence[ImageHeader]
    ) -> list[PreparedImage]:
        """In parallel; of several broken images the first is named, and what has not begun is dropped."""
        futures = [
            self._executor.submit(self._prepare_one, index, image, header)
            for index, (image, header) in enumerate(zip(images, headers, strict=True))
        ]
        try:
            return [await asyncio.wrap_future(future) for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def _prepare_one(self, index: int, image: bytes, header: ImageHeader) -> PreparedImage:
        with _blaming(index):
            patches = self._source.encoder.preprocessor(header.decode())
        facts = ImageFacts(
            num_tokens=patches.num_tokens,
            grid_thw=patches.grid_thw,
            width=header.width,
            height=header.height,
            sha256=hashlib.sha256(image).hexdigest(),
        )
        return PreparedImage(patches, facts)

    async def _encode(
        self, images: Sequence[PreparedImage], options: EmbedOptions, context: RequestContext
    ) -> BatchResult:
        output = options.output_spec()
        submitted_at = time.perf_counter()
        batch = self._source.submit([EncodeItem(image.patches, output) for image in images])
        result = await asyncio.wrap_future(batch)
        context.stages_s["queue"] = result.started_at - submitted_at
        context.stages_s["encode"] = result.finished_at - result.started_at
        return result

    async def _serialize(
        self,
        images: Sequence[PreparedImage],
        options: EmbedOptions,
        result: BatchResult,
        context: RequestContext,
    ) -> bytes:
        started = time.perf_counter()
        encoder = self._source.encoder
        model = ModelIdentity(self._model_name, encoder.revision, encoder.fingerprint)
        facts = [image.facts for image in images]
        if sum(embedding.numel() for embedding in result.embeddings) <= _INLINE_NUMBERS:
            answer = encode_json(model, options, facts, result.embeddings)
        else:
            answer = await self._run(encode_json, model, options, facts, result.embeddings)
        context.stages_s["serialize"] = time.perf_counter() - started
        return answer

    async def _run(self, function: Callable[[*Ts], T], /, *args: *Ts) -> T:
        """Runs a blocking function off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)


def _accept(request: Request) -> str | None:
    """The Accept header, which may come in several lines."""
    return ", ".join(request.headers.getlist("accept")) or None


@contextmanager
def _blaming(index: int) -> Iterator[None]:
    """Says in an error which image it is about."""
    param = image_param(index)
    try:
        yield
    except ApiError as error:
        error.param = error.param or param
        raise
    except AspectRatioError as error:
        raise BadRequest(str(error), code="invalid_aspect_ratio", param=param) from None

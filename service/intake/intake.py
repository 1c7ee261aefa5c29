"""One request for embeddings, from its head and its body to its images and options.

    head checked ─► body read ─► options resolved

A request with an invalid head is refused before its body is read. Knows the rules of each route; knows
nothing of pixels or of how URLs are fetched.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from service.answers.answer_options import AnswerOptions
from service.errors import UnsupportedMedia
from service.intake.body import check_length, embed_reader, openai_reader, read_body, takes_options
from service.intake.embed_body import BodyLimits, BodyReader, EmbedBody, Images, RunBlocking
from service.intake.openai_body import ServedModel
from service.intake.options import check_options, openai_options, read_query, resolve_options
from service.intake.request_head import RequestHead

Resolve = Callable[[Mapping[str, str | bool]], AnswerOptions]  # from the options that a body holds


@dataclass(frozen=True)
class Intake:
    """A request whose head has been checked and whose body is still to come."""

    num_bytes: int  # of the body, as the head says; 0 if it does not say
    _reader: BodyReader[EmbedBody]
    _limits: BodyLimits
    _resolve: Resolve

    async def read(
        self, chunks: AsyncIterator[bytes], run_blocking: RunBlocking
    ) -> tuple[Images, AnswerOptions]:
        """Reads the body and resolves the options. Raises as `read_body` does, and for invalid options."""
        body = await read_body(self._reader, chunks, self._limits, run_blocking)
        return body.images, self._resolve(body.options)


def embed_intake(head: RequestHead, limits: BodyLimits) -> Intake:
    """Checks the head of a request to `/embed`. Raises `ApiError` if no body could make it valid."""
    return _intake(head, limits, _embed_options(head), embed_reader(head.content_type, limits))


def openai_intake(head: RequestHead, limits: BodyLimits, served: ServedModel) -> Intake:
    """Checks the head of a request to `/v1/embeddings`. Raises `ApiError` if no body could make it valid."""

    def resolve(sent: Mapping[str, str | bool]) -> AnswerOptions:
        return openai_options(sent, head.accept)

    return _intake(head, limits, resolve, openai_reader(head.content_type, limits, served))


def _embed_options(head: RequestHead) -> Resolve:
    """Resolves the options now if the body cannot hold any, else once the body was read."""
    query = read_query(head.query)
    if takes_options(head.content_type):
        check_options(query)
        return lambda sent: resolve_options({**sent, **query}, head.accept)
    options = resolve_options(query, head.accept)
    return lambda sent: options


def _intake(head: RequestHead, limits: BodyLimits, resolve: Resolve, reader: BodyReader[EmbedBody]) -> Intake:
    check_head(head, limits)
    return Intake(head.content_length or 0, reader, limits, resolve)


def check_head(head: RequestHead, limits: BodyLimits) -> None:
    """Raises `UnsupportedMedia` for a compressed body, `TooLarge` for one that is announced as too large."""
    if head.content_encoding != "identity":
        raise UnsupportedMedia(
            "a compressed body is not served; send it without Content-Encoding",
            code="unsupported_content_type",
        )
    check_length(head.content_length, limits)

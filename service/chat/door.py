"""One request for the LLM server, from its head to the last byte of the answer.

    body read ─► images found ─► handed over ─► sent on with their uuids ─► answer streamed back

`ChatDoor.serve` is that map. Knows the order of the steps; how a step is done stands in its own room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass

import httpcore
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Message, Send

from service.chat.chat_body import ChatForm, find_messages, parse_chat
from service.chat.llm_client import LlmClient
from service.chat.passed_headers import answer_headers, request_headers
from service.errors import LlmTimeout, LlmUnreachable
from service.handoff.entry import Entry
from service.http.caller import ended_by_caller
from service.http.context import context_of
from service.intake.byte_budget import ByteBudget, Permit
from service.intake.intake import check_head
from service.intake.json_body import JsonReader
from service.intake.request_head import parse_head
from service.metrics import Metrics
from service.pipeline import Pipeline

# Clients may close their connection at this mark, before the stream itself has ended. Source: OpenAI's API.
_END_OF_STREAM = b"data: [DONE]\n\n"


@dataclass
class _Outcome:
    """How a request to the LLM server ended, as the metrics name it."""

    status: str = "abandoned"

    @property
    def is_complete(self) -> bool:
        """Whether the client has got all that it can use, even if it left before the end."""
        return self.status.isdecimal()


class ChatDoor:
    """Passes requests on to the LLM server. Their images are embedded here, and their tokens handed over."""

    def __init__(
        self,
        pipeline: Pipeline,
        llm: LlmClient,
        budget: ByteBudget,
        metrics: Metrics,
        *,
        passes_authorization: bool,
    ) -> None:
        """`passes_authorization`: whether the LLM server gets the client's Authorization header."""
        self._pipeline = pipeline
        self._llm = llm
        self._budget = budget
        self._metrics = metrics
        self._passes_authorization = passes_authorization

    async def serve(self, request: Request, path: str, form: ChatForm, send: Send) -> None:
        """Answers a chat. Raises `ApiError`, and `ClientDisconnect` once the caller has left."""
        with self._permit(request) as permit:
            body, entries = await self._body(request, form, permit)
            permit.keep(len(body))
            outcome = _Outcome()
            try:
                with ended_by_caller(request.receive):
                    await self._exchange(request, path, body, entries, outcome, send)
            except ClientDisconnect:
                if not outcome.is_complete:
                    raise

    async def forward(self, request: Request, path: str, send: Send) -> None:
        """Answers a request without a body. Raises `ApiError`."""
        await self._exchange(request, path, b"", (), _Outcome(), send)

    async def look(self, request: Request) -> tuple[Request, bool]:
        """Reads the body. Returns the request, to be read again, and whether it is a chat."""
        context = context_of(request.scope)
        with self._permit(request) as permit:
            async with self._pipeline.time_limit(context):
                body, is_chat = await self._pipeline.read(JsonReader(find_messages), request, permit, context)
        return _unread(request, body), is_chat

    async def aclose(self) -> None:
        """Closes the connections to the LLM server."""
        await self._llm.aclose()

    def _permit(self, request: Request) -> AbstractContextManager[Permit]:
        """The permit for the body, which may be refused by its headers alone."""
        head = parse_head(request.headers, b"")
        check_head(head, self._pipeline.body_limits)
        return self._budget.permit(head.content_length or 0)

    async def _body(self, request: Request, form: ChatForm, permit: Permit) -> tuple[bytes, Sequence[Entry]]:
        """The body for the LLM server, and the entries of its images, leased."""
        pipeline, context = self._pipeline, context_of(request.scope)
        async with pipeline.time_limit(context):
            reader = JsonReader(parse_chat, form, pipeline.body_limits)
            chat = await pipeline.read(reader, request, permit, context)
            if not chat.images:
                return chat.body, ()
            entries = await pipeline.hand_over(chat.images, request, permit, context)
            return await pipeline.run_blocking(chat.with_entries, entries), entries

    async def _exchange(
        self,
        request: Request,
        path: str,
        body: bytes,
        entries: Sequence[Entry],
        outcome: _Outcome,
        send: Send,
    ) -> None:
        """Sends the request on and streams the answer back, each piece as it comes.

        The LLM server may have a queue of its own. Once its answer begins it has loaded the tokens.
        """
        context, scope = context_of(request.scope), request.scope
        headers = request_headers(
            scope["headers"], context.request_id, passes_authorization=self._passes_authorization
        )
        asking = self._llm.ask(request.method, path, scope["query_string"], headers, body)
        async with AsyncExitStack() as stack:
            stack.enter_context(self._counted(outcome))
            stop_renewing = stack.enter_context(self._pipeline.renewed_leases(entries))
            with context.stage("llm"):
                answer = await stack.enter_async_context(asking)
            await send(_start(answer))
            async for piece in answer.aiter_stream():
                stop_renewing()
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                if piece.endswith(_END_OF_STREAM):
                    outcome.status = str(answer.status)
            outcome.status = str(answer.status)
        await send({"type": "http.response.body", "body": b""})

    @contextmanager
    def _counted(self, outcome: _Outcome) -> Iterator[None]:
        """Counts one request to the LLM server when it has ended."""
        try:
            yield
        except (LlmUnreachable, LlmTimeout) as error:
            outcome.status = "timeout" if isinstance(error, LlmTimeout) else "unreachable"
            raise
        finally:
            self._metrics.count_llm_request(outcome.status)


def _start(answer: httpcore.Response) -> Message:
    headers = answer_headers(answer.headers)
    return {"type": "http.response.start", "status": answer.status, "headers": headers}


def _unread(request: Request, body: bytes) -> Request:
    """The request with its body to be read once more."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await request.receive()

    return Request(request.scope, receive)

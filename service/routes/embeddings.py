"""`POST /v1/embeddings`, in the shape of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from service.chat.chat_body import CHAT
from service.chat.door import ChatDoor
from service.engine.engine import Engine
from service.errors import ApiError, BadRequest, InvalidShape
from service.pipeline import Pipeline
from service.routes.openapi import EMBEDDINGS_OPENAPI, error_responses
from service.routes.response import AcceptedResponse, AnswerResponse
from service.routes.schemas import OpenAIResponse

PATH = "/v1/embeddings"


def add_routes(router: APIRouter, engine: Engine, pipeline: Pipeline, door: ChatDoor | None) -> None:
    """With a `door`, requests with messages in place of `input` are for the LLM server."""

    async def embeddings(request: Request) -> Response:
        with engine.accept():
            return await own(request)

    async def own(request: Request) -> Response:
        with _openai_errors():
            return AnswerResponse(await pipeline.embed_openai(request))

    async def either(request: Request) -> Response:
        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            assert door is not None, "the route has a door"
            seen, is_chat = await door.look(request)
            if is_chat:
                await door.serve(seen, PATH, CHAT, send)
            else:
                response = await own(seen)
                await response(scope, receive, send)

        return AcceptedResponse(engine, respond)

    router.add_api_route(
        PATH,
        embeddings if door is None else either,
        methods=["POST"],
        summary="Embeddings of images, in the shape of OpenAI's API",
        description="One unit vector for each image of `input`: the normalized mean of its tokens. "
        "Text is refused. Unknown members are ignored.",
        responses={
            200: {"model": OpenAIResponse, "description": "One entry for each image, in order"},
            **error_responses(400, 404, 406, 408, 413, 415, 429, 431, 500, 502, 503, 504),
        },
        openapi_extra=EMBEDDINGS_OPENAPI,
        tags=["embeddings"],
    )


@contextmanager
def _openai_errors() -> Iterator[None]:
    """Adapts errors to OpenAI's clients: 400 in place of 422, and `input` in place of `images`."""
    try:
        yield
    except ApiError as error:
        if error.param is not None and error.param.startswith("images"):
            error.param = "input" + error.param.removeprefix("images")
        if isinstance(error, InvalidShape):
            raise BadRequest(error.message, code=error.code, param=error.param) from None
        raise

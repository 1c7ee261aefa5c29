"""The routes of the LLM server behind this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from service.chat.chat_body import CHAT, RESPONSES, ChatForm
from service.chat.door import ChatDoor
from service.engine.engine import Engine
from service.routes.info import MODELS
from service.routes.openapi import error_responses
from service.routes.response import AcceptedResponse

FORMS: Mapping[str, ChatForm] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": CHAT,  # has no images
    "/v1/responses": RESPONSES,
    "/tokenize": CHAT,
    "/pooling": CHAT,
}
PATHS = tuple(FORMS)

_TAG = "LLM server"
_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
}


def add_routes(router: APIRouter, engine: Engine, door: ChatDoor) -> None:
    for path, form in FORMS.items():
        _add_chat(router, engine, door, path, form)
    _add_models(router, engine, door)


def _add_chat(router: APIRouter, engine: Engine, door: ChatDoor, path: str, form: ChatForm) -> None:
    async def chat(request: Request) -> Response:
        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            await door.serve(request, path, form, send)

        return AcceptedResponse(engine, respond)

    images = "Images are embedded on the way" if form.takes_tokens else "Images are refused"
    router.add_api_route(
        path,
        chat,
        methods=["POST"],
        summary=f"The LLM server's {path}",
        description=f"The request is passed on to the LLM server, and its answer is streamed back. {images}.",
        responses=error_responses(400, 408, 413, 415, 429, 431, 500, 502, 503, 504),
        openapi_extra=_BODY,
        tags=[_TAG],
    )


def _add_models(router: APIRouter, engine: Engine, door: ChatDoor) -> None:
    """The LLM server is asked at each request. While it is down, the answer is 502 `llm_unreachable`."""

    async def models(request: Request) -> Response:
        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            await door.forward(request, MODELS, send)

        return AcceptedResponse(engine, respond)

    router.add_api_route(
        MODELS,
        models,
        summary="The LLM server's models",
        responses=error_responses(502, 503, 504),
        tags=[_TAG],
    )

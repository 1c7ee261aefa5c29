"""`POST /embed`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from service.engine.engine import Engine
from service.pipeline import Pipeline
from service.routes.openapi import EMBED_ANSWER, EMBED_OPENAPI, error_responses
from service.routes.response import AnswerResponse

PATH = "/embed"


def add_routes(router: APIRouter, engine: Engine, pipeline: Pipeline) -> None:
    async def embed(request: Request) -> Response:
        with engine.accept():
            return AnswerResponse(await pipeline.embed(request))

    router.add_api_route(
        PATH,
        embed,
        methods=["POST"],
        summary="Embeddings of one or more images",
        description="The body is the bytes of one image, a form with images, or JSON with images. "
        "Options are query parameters, form parts or JSON members; a query parameter wins. "
        "If one image fails, the request fails.",
        responses={
            200: EMBED_ANSWER,
            **error_responses(400, 406, 408, 413, 415, 422, 429, 431, 500, 502, 503, 504),
        },
        openapi_extra=EMBED_OPENAPI,
        tags=["embeddings"],
    )

"""`POST /embed`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from service.engine import Engine
from service.pipeline import Pipeline
from service.schemas import EMBED_OPENAPI, EmbedResponse, error_responses

PATH = "/embed"


def add_routes(router: APIRouter, engine: Engine, pipeline: Pipeline) -> None:
    async def embed(request: Request) -> Response:
        with engine.admit():
            return Response(await pipeline.embed(request), media_type="application/json")

    router.add_api_route(
        PATH,
        embed,
        methods=["POST"],
        summary="Embeddings of one or more images",
        description="The body is the bytes of one image, a form with images, or JSON with images in base64. "
        "Options are query parameters, form parts or JSON members; a query parameter wins. "
        "A request succeeds whole or fails whole.",
        responses={
            200: {"model": EmbedResponse, "description": "One entry for each image, in order"},
            **error_responses(400, 406, 408, 413, 415, 422, 431, 500, 502, 503, 504),
        },
        openapi_extra=EMBED_OPENAPI,
        tags=["embeddings"],
    )

"""`/info`, and `/v1/models` in the shape of OpenAI's API."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from service.answers.dtypes import dtype_name
from service.config.settings import Settings
from service.engine.engine import Engine
from service.errors import NotFound, printable
from service.routes.openapi import error_responses
from service.routes.schemas import CudaGraphs, Info, Limits, ModelCard, ModelList, Preprocessing

INFO = "/info"
MODELS = "/v1/models"
MODEL = "/v1/models/{model_id:path}"  # a hub id has a slash
PATHS = (INFO, MODELS, MODEL)


def add_routes(
    router: APIRouter, settings: Settings, engine: Engine, version: str, *, started_at: int
) -> None:
    """`started_at`: seconds since 1970. An LLM server has its own list of models."""
    card = ModelCard(id=settings.served_name, created=started_at)
    model_body = card.model_dump_json().encode()
    models_body = ModelList(data=[card]).model_dump_json().encode()

    async def info(request: Request) -> Response:
        engine.check_loaded()
        body = _info(settings, engine, version).model_dump_json()
        return Response(body, media_type="application/json")

    async def models(request: Request) -> Response:
        return Response(models_body, media_type="application/json")

    async def model(request: Request) -> Response:
        model_id: str = request.path_params["model_id"]
        if model_id != card.id:
            raise NotFound(
                f'there is no model "{printable(model_id)}" here; GET {MODELS} names the served model',
                code="model_not_found",
                param="model",
            )
        return Response(model_body, media_type="application/json")

    router.add_api_route(
        INFO,
        info,
        summary="The model, its dimensions, limits, graph budgets, preprocessing and devices",
        responses={200: {"model": Info}, **error_responses(503)},
        tags=["model"],
    )
    if settings.llm_url is None:
        router.add_api_route(
            MODELS,
            models,
            summary="The served model, in the shape of OpenAI's API",
            responses={200: {"model": ModelList}},
            tags=["model"],
        )
    router.add_api_route(
        MODEL,
        model,
        summary="The served model, by its name",
        responses={200: {"model": ModelCard}, **error_responses(404)},
        openapi_extra={
            "parameters": [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}]
        },
        tags=["model"],
    )


def _info(settings: Settings, engine: Engine, version: str) -> Info:
    encoder = engine.encoder
    graphs = encoder.graphs
    return Info(
        model=settings.served_name,
        demo=settings.is_demo,
        revision=encoder.revision,
        fingerprint=encoder.fingerprint,
        dtype=dtype_name(encoder.dtype),
        devices=engine.devices,
        attn_backend=encoder.attn_backend,
        encoder_cudagraph=CudaGraphs(
            enabled=bool(graphs.graphs),
            token_budgets=tuple(sorted(graphs.graphs)),
            max_images_per_batch=graphs.max_images if graphs.graphs else 0,
        ),
        hidden_size=encoder.hidden_size,
        width=encoder.width,
        num_deepstack=encoder.num_deepstack,
        limits=Limits.model_validate(settings, from_attributes=True),
        preprocessing=Preprocessing.model_validate(encoder.preprocessor.config, from_attributes=True),
        version=version,
    )

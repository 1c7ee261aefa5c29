"""What is served: `/info` and, in the shape of OpenAI's API, `/v1/models`."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from service.dtypes import dtype_name
from service.engine import Engine
from service.schemas import CudaGraphs, Info, Limits, ModelCard, ModelList, Preprocessing, error_responses
from service.settings import Settings

INFO = "/info"
MODELS = "/v1/models"
PATHS = (INFO, MODELS)


def add_routes(router: APIRouter, settings: Settings, engine: Engine, version: str) -> None:
    card = ModelCard(id=settings.served_name, created=int(time.time()))
    models_body = ModelList(data=[card]).model_dump_json().encode()

    async def info(request: Request) -> Response:
        engine.check_loaded()
        body = _info(settings, engine, version).model_dump_json()
        return Response(body, media_type="application/json")

    async def models(request: Request) -> Response:
        return Response(models_body, media_type="application/json")

    router.add_api_route(
        INFO,
        info,
        summary="The model, its dimensions, limits, graph budgets, preprocessing and devices",
        responses={200: {"model": Info}, **error_responses(503)},
        tags=["model"],
    )
    router.add_api_route(
        MODELS,
        models,
        summary="The served model, in the shape of OpenAI's API",
        responses={200: {"model": ModelList}},
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

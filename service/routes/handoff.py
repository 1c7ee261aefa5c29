"""`/handoff/{uuid}`: the tokens of one image, for an LLM server on another host."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import Executor
from email.utils import formatdate

from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from service.errors import NotFound
from service.handoff.store import TokenStore
from service.http.context import context_of
from service.metrics import Metrics
from service.routes.openapi import BINARY, error_responses

PATH = "/handoff/{uuid}"


def add_routes(router: APIRouter, store: TokenStore, counters: Metrics, executor: Executor) -> None:
    """`executor` runs what may wait for another process."""

    async def read(request: Request) -> Response:
        uuid: str = request.path_params["uuid"]
        try:
            file = store.open(uuid)
        except OSError:
            raise _not_found() from None
        counters.count_read()
        return _OpenFileResponse(file, uuid)

    async def delete(request: Request) -> Response:
        uuid: str = request.path_params["uuid"]
        if not await asyncio.get_running_loop().run_in_executor(executor, store.delete, uuid):
            raise _not_found()
        return Response(status_code=204)

    router.add_api_route(
        PATH,
        read,
        methods=["GET"],
        summary="The tokens of one image, as a safetensors file",
        description="The tensor `tokens` [num_tokens, width] in the model's dtype, with the metadata "
        "`grid_thw` and `fingerprint`. Takes `Range`.",
        responses={
            200: {"content": {"application/x-safetensors": BINARY}},
            206: {"description": "The bytes that `Range` names"},
            **error_responses(404),
        },
        tags=["handoff"],
    )
    router.add_api_route(
        PATH,
        delete,
        methods=["DELETE"],
        summary="Drops the tokens of one image",
        status_code=204,
        responses=error_responses(404),
        tags=["handoff"],
    )


def _not_found() -> NotFound:
    return NotFound("there are no such tokens; they may have been dropped", code="handoff_not_found")


class _OpenFileResponse(FileResponse):
    """Sends an open file, which may be dropped from its folder meanwhile, and closes it."""

    chunk_size = 2**20

    def __init__(self, file: int, uuid: str) -> None:
        # The content of an entry never changes. The modification time of its file says how long it is leased.
        headers = {"etag": f'"{uuid}"', "last-modified": formatdate(0, usegmt=True)}
        super().__init__(f"/proc/self/fd/{file}", media_type="application/x-safetensors", headers=headers)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = context_of(scope).method  # for HEAD the scope has GET; no file is read for it
        try:
            await super().__call__({**scope, "method": method}, receive, send)
        finally:
            os.close(self._file)

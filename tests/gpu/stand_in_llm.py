"""A stand-in for an LLM server, to measure what the door in front of it takes.

    python -m tests.gpu.stand_in_llm --dir TOKENS --port 8100

It first loads the tokens of each image from the store, as vLLM's worker does with the connector, and then
answers at once. Chats without images show what the rest takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.support.vllm_connector import Role, connector_module, vllm_config


class Worker:
    """A worker of vLLM, with one thread."""

    def __init__(self, connector: Any, folder: Path) -> None:
        self._connector = connector
        self._folder = folder
        self._worker = connector.VisionSidecarConnector(vllm_config(dir=str(folder)), Role.WORKER)
        self._thread = ThreadPoolExecutor(1)

    async def load(self, uuids: list[str]) -> int:
        """Loads the tokens of images, to the GPU if there is one. Returns their bytes."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._load, uuids)

    def _load(self, uuids: list[str]) -> int:
        num_bytes = 0
        for uuid in uuids:
            path = str(self._folder / f"{uuid}.safetensors")
            file = os.open(path, os.O_RDONLY)
            tokens = self._connector.Tokens.read(file)
            self._worker._load(path, tokens)
            os.close(file)
            num_bytes += tokens.num_bytes
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return num_bytes


def create_app(worker: Worker) -> Starlette:
    async def chat(request: Request) -> JSONResponse:
        messages = json.loads(await request.body())["messages"]
        parts = [part for part in messages[0]["content"] if part["type"] == "image_embeds"]
        num_bytes = await worker.load([part["uuid"] for part in parts])
        return JSONResponse({"choices": [{"message": {"content": "a"}}], "usage": {"bytes": num_bytes}})

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    with connector_module() as module:
        app = create_app(Worker(module, arguments.dir))
        uvicorn.run(app, port=arguments.port, log_level="warning")

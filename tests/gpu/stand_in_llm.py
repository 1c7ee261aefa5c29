"""A stand-in for an LLM server, to measure what the door in front of it takes.

    python -m tests.gpu.stand_in_llm --dir TOKENS --port 8100

It first copies the tokens of each image from the store to the GPU, as a connector does, and then answers at
once. Chats without images show what the rest takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

_NUM_THREADS = 4
_BUFFER_BYTES = 2**28


class Loader:
    """Reads files into pinned memory and copies them to the GPU, where there is one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_cuda = torch.cuda.is_available()
        self._threads = ThreadPoolExecutor(_NUM_THREADS)
        self._buffers: SimpleQueue[torch.Tensor] = SimpleQueue()
        for _ in range(_NUM_THREADS):
            self._buffers.put(torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=self._is_cuda))

    async def load(self, uuid: str) -> torch.Tensor:
        """The bytes of an entry."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._load, uuid)

    def _load(self, uuid: str) -> torch.Tensor:
        buffer = self._buffers.get()
        try:
            with (self._folder / f"{uuid}.safetensors").open("rb", buffering=0) as file:
                num_bytes = os.fstat(file.fileno()).st_size
                view, done = buffer.numpy().data, 0
                while done < num_bytes:
                    done += file.readinto(view[done:num_bytes])
            return buffer[:num_bytes].to("cuda" if self._is_cuda else "cpu", copy=True)
        finally:
            self._buffers.put(buffer)


def create_app(folder: Path) -> Starlette:
    loader = Loader(folder)

    async def chat(request: Request) -> JSONResponse:
        messages = json.loads(await request.body())["messages"]
        uuids = [part["uuid"] for part in messages[0]["content"] if part["type"] == "image_embeds"]
        loaded = await asyncio.gather(*map(loader.load, uuids))
        usage = {"bytes": sum(map(len, loaded))}
        return JSONResponse({"choices": [{"message": {"content": "a"}}], "usage": usage})

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    uvicorn.run(create_app(arguments.dir), port=arguments.port, log_level="warning")

"""Reads the tokens that a server keeps in its folder, as an LLM server beside it does.

Each file is read once, into memory that is used again; with a GPU into pinned memory, from which it could be
copied there.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

_NUM_THREADS = 4
_BUFFER_BYTES = 2**26


class TokenReader:
    """Reads files of tokens in threads. It takes seconds to create, because of torch."""

    def __init__(self, folder: str) -> None:
        import torch

        self._folder = folder
        self._threads = ThreadPoolExecutor(_NUM_THREADS)
        self._buffers: SimpleQueue[memoryview] = SimpleQueue()
        is_pinned = torch.cuda.is_available()
        for _ in range(_NUM_THREADS):
            buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
            self._buffers.put(buffer.numpy().data)

    async def read(self, body: bytes) -> tuple[int, int]:
        """Reads the tokens that an answer to `format=handoff` names.

        Returns their bytes, and how many files are missing.
        """
        uuids = [item["uuid"] for item in json.loads(body)["data"]]
        loop = asyncio.get_running_loop()
        sizes = await asyncio.gather(
            *(loop.run_in_executor(self._threads, self._read_file, uuid) for uuid in uuids)
        )
        return sum(filter(None, sizes)), sizes.count(None)

    def _read_file(self, uuid: str) -> int | None:
        """The size of the file. None if it is not there."""
        buffer = self._buffers.get()
        try:
            with open(f"{self._folder}/{uuid}.safetensors", "rb", buffering=0) as file:
                num_bytes = 0
                while read := file.readinto(buffer):
                    num_bytes += read
                return num_bytes
        except FileNotFoundError:
            return None
        finally:
            self._buffers.put(buffer)

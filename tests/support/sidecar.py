"""A vision-sidecar in front of an LLM server, as a process that can be stopped and started again."""

from __future__ import annotations

import base64
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from service.__main__ import listen
from tests.support.process import Process
from tests.support.traffic import Scrape


class Sidecar:
    """The service with one model, one store and one LLM server. Starts the first time with `start`."""

    def __init__(
        self, port: int, checkpoint: Path, store: Path, *flags: str, api_key: str | None = None
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.store = store
        self.headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._flags = ["--port", str(port), "--device", "cpu", "--model", str(checkpoint)]
        self._flags += ["--handoff-dir", str(store), *flags]
        self._process: Process | None = None

    def start(self) -> None:
        """Starts the server at its port, and waits until it is ready."""
        self._process = Process(*self._flags).ready()

    def send_signal(self, number: int) -> None:
        """Sends a signal."""
        assert self._process is not None, "the server has been started"
        self._process.signal(number)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Sends a signal that ends the server, and waits for the end."""
        assert self._process is not None, "the server has been started"
        self._process.signal(number)
        self._process.exit_code()
        self._process = None

    def close(self) -> None:
        """Ends the server, if it runs."""
        if self._process is not None:
            self._process.kill()

    def embed(self, images: Sequence[bytes], query: str) -> httpx.Response:
        """Has images embedded; `query` is `format=handoff` or `format=vllm`."""
        body = {"images": [base64.b64encode(image).decode() for image in images]}
        return httpx.post(f"{self.url}/embed?{query}", json=body, headers=self.headers, timeout=60)

    def hand_over(self, images: Sequence[bytes]) -> list[dict[str, Any]]:
        """Leaves the tokens of images in the store. Returns a content part for each."""
        answer = self.embed(images, "format=handoff").raise_for_status().json()
        return [tokens_part(entry["uuid"], entry["grid_thw"]) for entry in answer["data"]]

    def tensors(self, images: Sequence[bytes]) -> list[dict[str, Any]]:
        """Content parts with the tokens of images in them."""
        parts: list[dict[str, Any]] = self.embed(images, "format=vllm").raise_for_status().json()["content"]
        return parts

    def has(self, uuid: str) -> bool:
        """Whether the store has the tokens of an image."""
        return httpx.get(f"{self.url}/handoff/{uuid}", headers=self.headers).is_success

    def delete(self, uuid: str) -> None:
        """Drops the tokens of an image."""
        httpx.delete(f"{self.url}/handoff/{uuid}", headers=self.headers).raise_for_status()

    def metric(self, name: str, labels: str = "") -> float:
        """The sum over the series of a metric."""
        return Scrape(httpx.get(f"{self.url}/metrics").text).total(name, labels)


def tokens_part(uuid: str, grid_thw: Sequence[int]) -> dict[str, Any]:
    """A content part that names tokens in a store."""
    return {"type": "image_embeds", "uuid": uuid, "image_embeds": {"image_grid_thw": list(grid_thw)}}


def free_port() -> int:
    """A port that nothing listens on."""
    with listen("127.0.0.1", 0) as free:
        port: int = free.getsockname()[1]
    return port

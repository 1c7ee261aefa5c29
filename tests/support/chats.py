"""Chats that tests send to a server in front of an LLM server."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import httpx

from tests.support.serving import Served

CHAT = "/v1/chat/completions"
Door = Callable[..., Served]  # starts a server in front of the LLM server, with changes to its settings


def image_part(image: bytes) -> dict[str, Any]:
    uri = "data:image/png;base64," + base64.b64encode(image).decode()
    return {"type": "image_url", "image_url": {"url": uri}}


def chat(*parts: object) -> dict[str, Any]:
    return {"model": "llm", "messages": [{"role": "user", "content": [*parts]}]}


def url(door: Served, path: str = CHAT) -> str:
    return f"http://127.0.0.1:{door.port}{path}"


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]

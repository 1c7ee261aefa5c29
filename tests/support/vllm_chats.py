"""Photographs, chats about them, and how close two answers of vLLM are."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from PIL import Image

from tests.support.chats import CHAT
from tests.support.vllm_server import MODEL

TOLERANCE = 1e-4  # of log-probabilities in float32
MAX_TOKENS = 8
TEXT = {"type": "text", "text": "Describe what these pictures show."}

Part = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """The greedy tokens of an answer and their log-probabilities."""

    text: str
    tokens: Sequence[str]
    logprobs: Sequence[float]
    num_prompt_tokens: int
    num_cached_tokens: int


def photo(seed: int, height: int = 224, width: int = 224) -> bytes:
    """A JPEG of soft colours, another one for each seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG")
    return file.getvalue()


def url_part(image: bytes) -> Part:
    """The content part that clients of OpenAI's API send."""
    uri = "data:image/jpeg;base64," + base64.b64encode(image).decode()
    return {"type": "image_url", "image_url": {"url": uri}}


def messages_of(*parts: Part) -> list[dict[str, Any]]:
    """One turn of a chat: images and a question."""
    return [{"role": "user", "content": [*parts, TEXT]}]


def body_of(messages: Sequence[Mapping[str, Any]], **members: Any) -> dict[str, Any]:
    """The body of a request for a greedy answer with its log-probabilities."""
    greedy = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": True}
    return {"model": MODEL, "messages": messages, **greedy, **members}


def send(
    url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None, *, timeout_s: float = 100
) -> httpx.Response:
    """Sends a chat."""
    return httpx.post(f"{url}{CHAT}", json=body, headers=headers, timeout=timeout_s)


def ask(url: str, *parts: Part, headers: Mapping[str, str] | None = None) -> Answer:
    """The answer to a chat of one turn. Fails unless there is one."""
    return read_answer(send(url, body_of(messages_of(*parts)), headers))


def read_answer(response: httpx.Response) -> Answer:
    """Fails unless the response is the answer to a chat."""
    assert response.status_code == 200, response.text
    answer = response.json()
    [choice] = answer["choices"]
    tokens = choice["logprobs"]["content"]
    details = answer["usage"].get("prompt_tokens_details") or {}
    return Answer(
        choice["message"]["content"],
        [token["token"] for token in tokens],
        [token["logprob"] for token in tokens],
        answer["usage"]["prompt_tokens"],
        details.get("cached_tokens") or 0,
    )


def difference(one: Answer, other: Answer) -> float:
    """The largest difference of log-probabilities. The tokens must be equal."""
    assert one.tokens == other.tokens
    assert one.num_prompt_tokens == other.num_prompt_tokens
    assert len(one.logprobs) == MAX_TOKENS
    return float(np.abs(np.subtract(one.logprobs, other.logprobs)).max())


def check_equal(one: Answer, other: Answer) -> float:
    """Fails unless two answers are equal within the tolerance. Returns their difference."""
    found = difference(one, other)
    assert found <= TOLERANCE
    return found


def check_error(response: httpx.Response) -> None:
    """Fails unless the response is an error."""
    assert response.status_code >= 400, response.text
    assert "error" in response.json(), response.text

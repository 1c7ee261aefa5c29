"""Asks a vLLM server about images that vision-sidecar has encoded.

    python embed_and_chat.py "What do these pictures show?" one.jpg two.png

Needs httpx. The sidecar answers with one content part for each image, which goes into the message as it is.
vLLM, started with --enable-mm-embeds, never receives a pixel. Both must serve the same checkpoint at the same
revision.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

try:
    import httpx
except ImportError as error:
    sys.exit(
        f"{error.name} is not installed for {sys.executable}. "
        "Use the Python of the project, .venv/bin/python, or run: pip install httpx"
    )


class ServerError(Exception):
    """A server did not answer, refused a request, or sent an answer of another form."""


class Server:
    """A server whose errors say its name and the URL."""

    def __init__(self, name: str, url: str, api_key: str | None, timeout_s: float) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._name = name
        self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout_s)

    def send(self, method: str, path: str, members: Sequence[str | int], **content: Any) -> Any:
        """Sends a request. Returns the value behind `members` in the JSON answer. Raises `ServerError`."""
        request = self._client.build_request(method, path, **content)
        try:
            answer = self._client.send(request)
        except httpx.HTTPError as error:
            raise self._error(request, f"does not answer: {str(error) or type(error).__name__}") from None
        if answer.is_error:
            raise self._error(request, f"refused the request: {answer.status_code} {reason_of(answer)}")
        try:
            return reduce(getitem, members, answer.json())
        except (ValueError, LookupError, TypeError):
            raise self._error(request, f"sent an unexpected answer: {answer.text[:200]!r}") from None

    def _error(self, request: httpx.Request, text: str) -> ServerError:
        return ServerError(f"{self._name} ({request.url}) {text}")


def reason_of(answer: httpx.Response) -> str:
    """The message of an error body, {"error": {"message": "..."}}; or else the beginning of the body."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return answer.text[:500]


def embed(sidecar: Server, images: Sequence[Path]) -> list[dict[str, Any]]:
    """One content part for each image, in the form that vLLM takes. Raises `ServerError`, `OSError`."""
    files = [("image", (path.name, path.read_bytes(), "application/octet-stream")) for path in images]
    parts: list[dict[str, Any]]
    parts = sidecar.send("POST", "/embed", ["content"], params={"format": "vllm"}, files=files)
    return parts


def ask(vllm: Server, model: str | None, question: str, images: Sequence[dict[str, Any]]) -> str:
    """The answer of the language model. Without a name, takes the first that the server lists."""
    name = model or vllm.send("GET", "/v1/models", ["data", 0, "id"])
    content = [*images, {"type": "text", "text": question}]
    body = {"model": name, "messages": [{"role": "user", "content": content}]}
    text: str = vllm.send("POST", "/v1/chat/completions", ["choices", 0, "message", "content"], json=body)
    return text


def server_url(text: str) -> str:
    if urlsplit(text).scheme not in ("http", "https"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL such as http://127.0.0.1:8080")
    return text


def main() -> int:
    assert __doc__ is not None, "python -OO strips the text for --help"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("question")
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE")
    parser.add_argument("--sidecar", type=server_url, default="http://127.0.0.1:8080", metavar="URL")
    parser.add_argument("--vllm", type=server_url, default="http://127.0.0.1:8000", metavar="URL")
    parser.add_argument("--model", help="name of the model in vLLM [the first that it lists]")
    options = parser.parse_args()
    # Keys come from the environment, because every user of the machine can read flags.
    sidecar = Server("vision-sidecar", options.sidecar, os.environ.get("SIDECAR_API_KEY"), 60)
    vllm = Server("vLLM", options.vllm, os.environ.get("VLLM_API_KEY"), 300)
    try:
        text = ask(vllm, options.model, options.question, embed(sidecar, options.images))
    except (ServerError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Asks a language model about images: a chat as any OpenAI client sends it.

    python chat.py "What do these pictures show?" one.jpg two.png

Needs httpx. vision-sidecar, started with --llm-url, embeds the images and passes the chat on to its LLM
server. To this program it is an LLM server like any other.
"""

from __future__ import annotations

import argparse
import base64
import mimetypes
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
    """The server did not answer, refused a request, or sent an answer of another form."""


def send(client: httpx.Client, method: str, path: str, members: Sequence[str | int], **content: Any) -> Any:
    """Sends a request. Returns the value behind `members` in the JSON answer. Raises `ServerError`."""
    request = client.build_request(method, path, **content)
    try:
        answer = client.send(request)
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise ServerError(f"{request.url} does not answer: {reason}") from None
    if answer.is_error:
        raise ServerError(f"{request.url} refused the request: {answer.status_code} {reason_of(answer)}")
    try:
        return reduce(getitem, members, answer.json())
    except (ValueError, LookupError, TypeError):
        raise ServerError(f"{request.url} sent an unexpected answer: {answer.text[:200]!r}") from None


def reason_of(answer: httpx.Response) -> str:
    """The message of an error body, {"error": {"message": "..."}}; or else the beginning of the body."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return answer.text[:500]


def image_part(path: Path) -> dict[str, Any]:
    """The content part for an image file. Raises `OSError`."""
    kind = mimetypes.guess_type(path)[0] or "image/jpeg"  # the server goes by the content
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def ask(client: httpx.Client, model: str | None, question: str, images: Sequence[Path]) -> str:
    """The answer of the language model. Without a name, takes the first model that the server lists.

    Raises `ServerError`, `OSError`.
    """
    content = [*map(image_part, images), {"type": "text", "text": question}]
    name = model or send(client, "GET", "/v1/models", ["data", 0, "id"])
    body = {"model": name, "messages": [{"role": "user", "content": content}]}
    text: str = send(client, "POST", "/v1/chat/completions", ["choices", 0, "message", "content"], json=body)
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
    parser.add_argument("--model", help="name of the language model [the first that the server lists]")
    options = parser.parse_args()
    # The key comes from the environment, because every user of the machine can read flags.
    key = os.environ.get("SIDECAR_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    client = httpx.Client(base_url=options.sidecar, headers=headers, timeout=300)
    try:
        text = ask(client, options.model, options.question, options.images)
    except (ServerError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Asks a vLLM server about images that vision-sidecar has encoded.

    python embed_and_chat.py "What is on these pictures?" one.jpg two.png

The sidecar answers with one content part for each image, ready to go into the message; vLLM, started with
--enable-mm-embeds, then never sees a pixel. Both must serve the same checkpoint at the same revision.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx


def embed(client: httpx.Client, url: str, images: Sequence[Path]) -> list[dict[str, Any]]:
    """One content part for each image, as vLLM takes it. Raises `httpx.HTTPStatusError`."""
    files = [("image", (path.name, path.read_bytes(), "application/octet-stream")) for path in images]
    answer = client.post(f"{url}/embed", params={"format": "vllm"}, files=files)
    content: list[dict[str, Any]] = checked(answer)["content"]
    return content


def ask(
    client: httpx.Client, url: str, model: str | None, question: str, images: list[dict[str, Any]]
) -> str:
    """The answer of the language model; without a name, of the one that the server has."""
    name = model or checked(client.get(f"{url}/v1/models"))["data"][0]["id"]
    content = [*images, {"type": "text", "text": question}]
    body = {"model": name, "messages": [{"role": "user", "content": content}]}
    answer = client.post(f"{url}/v1/chat/completions", json=body)
    text: str = checked(answer)["choices"][0]["message"]["content"]
    return text


def checked(answer: httpx.Response) -> Mapping[str, Any]:
    """Its JSON. Raises `httpx.HTTPStatusError` with what the server said is wrong."""
    if answer.is_error:
        message = f"{answer.request.url}: {answer.status_code} {answer.text[:500]}"
        raise httpx.HTTPStatusError(message, request=answer.request, response=answer)
    body: Mapping[str, Any] = answer.json()
    return body


def bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def main() -> int:
    assert __doc__ is not None, "python -OO strips the text for --help"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("question")
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE")
    parser.add_argument("--sidecar", default="http://127.0.0.1:8080", metavar="URL")
    parser.add_argument("--vllm", default="http://127.0.0.1:8000", metavar="URL")
    parser.add_argument("--model", help="name of the model in vLLM [the first that it lists]")
    options = parser.parse_args()
    # Keys come from the environment: a flag could be read by everyone on the machine.
    to_sidecar = bearer(os.environ.get("SIDECAR_API_KEY"))
    to_vllm = bearer(os.environ.get("VLLM_API_KEY"))
    try:
        with httpx.Client(headers=to_sidecar, timeout=60) as client:
            images = embed(client, options.sidecar, options.images)
        with httpx.Client(headers=to_vllm, timeout=300) as client:
            text = ask(client, options.vllm, options.model, options.question, images)
    except (httpx.HTTPError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

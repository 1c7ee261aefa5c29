"""The limits with which vLLM takes no images but tensors: docs/llm-servers.md says which ones work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.vllm_chats import (
    ask,
    body_of,
    check_equal,
    check_error,
    messages_of,
    photo,
    send,
    url_part,
)
from tests.support.vllm_lab import Lab
from tests.support.vllm_server import VllmServer
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.parametrize("lab", ["qwen3_vl"], indirect=True),
]


@pytest.fixture(scope="module")
def limited(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmServer]]:
    """A server that takes no images, and one that takes no videos either."""
    folder = tmp_path_factory.mktemp("limits")
    servers = [
        VllmServer(lab.checkpoint, folder / name, "--enable-mm-embeds", f"--limit-mm-per-prompt={limits}")
        for name, limits in (("image.log", '{"image": 0}'), ("both.log", '{"image": 0, "video": 0}'))
    ]
    try:
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.stop()


def test_image_limit_of_0(lab: Lab, limited: list[VllmServer]) -> None:
    server, image = limited[0], photo(5000)
    check_equal(ask(server.url, *lab.near.tensors([image])), ask(lab.plain.url, url_part(image)))
    check_error(send(server.url, body_of(messages_of(url_part(image)))))
    assert server.is_healthy()


def test_image_and_video_limits_of_0_end_the_engine(lab: Lab, limited: list[VllmServer]) -> None:
    """The documents warn of it. If this test fails, vLLM has been mended, and the warning can go."""
    server = limited[1]
    check_error(send(server.url, body_of(messages_of(*lab.near.tensors([photo(5010)])))))
    eventually(lambda: not server.is_healthy())
    assert "shape mismatch" in server.log()

"""Tensors in the body of a chat: with which limits vLLM takes them, and which ones end its engine."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest

from tests.support.sidecar import tokens_part
from tests.support.vllm_chats import (
    Part,
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
from tests.support.vllm_server import connector_flag, running
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.parametrize("lab", ["qwen3_vl"], indirect=True),
]

GRID, NUM_TOKENS, WIDTH = [1, 16, 16], 64, 192


def tensor_part(*shape: int) -> Part:
    """A content part with a tensor of zeros, which a client has made itself."""
    file = io.BytesIO()
    np.save(file, np.zeros(shape, np.float32))
    part = tokens_part("-".join(["own", *map(str, shape)]), GRID)
    part["image_embeds"]["image_embeds"] = base64.b64encode(file.getvalue()).decode()
    return part


def test_image_limit_of_0(lab: Lab, tmp_path: Path) -> None:
    image = photo(5000)
    limit = '--limit-mm-per-prompt={"image": 0}'
    with running(lab.checkpoint, tmp_path / "log", "--enable-mm-embeds", limit) as server:
        check_equal(ask(server.url, *lab.near.tensors([image])), ask(lab.plain.url, url_part(image)))
        check_error(send(server.url, body_of(messages_of(url_part(image)))))
        assert server.is_healthy()


def test_image_and_video_limits_of_0_end_the_engine(lab: Lab, tmp_path: Path) -> None:
    """The documents warn of it. If this test fails, vLLM has been mended, and the warning can go."""
    limit = '--limit-mm-per-prompt={"image": 0, "video": 0}'
    with running(lab.checkpoint, tmp_path / "log", "--enable-mm-embeds", limit) as server:
        check_error(send(server.url, body_of(messages_of(*lab.near.tensors([photo(5010)])))))
        eventually(lambda: not server.is_healthy())
        assert "shape mismatch" in server.log()


def test_own_tensors_that_do_not_fit_fail_alone(lab: Lab, tmp_path: Path) -> None:
    """Whoever can chat can send them, also through the door: a server with the connector takes tensors."""
    shapes = [
        (NUM_TOKENS, WIDTH // 3),
        (NUM_TOKENS, WIDTH - 1),
        (NUM_TOKENS - 1, WIDTH),
        (1, NUM_TOKENS, WIDTH),
    ]
    connector = connector_flag({"dir": str(lab.near.store)})
    with running(lab.checkpoint, tmp_path / "log", connector) as server:
        ask(server.url, tensor_part(NUM_TOKENS, WIDTH))
        for shape in shapes:
            check_error(send(server.url, body_of(messages_of(tensor_part(*shape)))))
            ask(server.url, *lab.near.hand_over([photo(5020)]))


def test_own_tensor_does_not_take_the_place_of_an_image(lab: Lab) -> None:
    image = photo(5030, 256, 256)
    [part] = lab.near.hand_over([image])
    own = tensor_part(NUM_TOKENS, WIDTH) | {"uuid": part["uuid"]}
    send(lab.near.url, body_of(messages_of(own)))
    check_equal(ask(lab.near.url, url_part(image)), ask(lab.plain.url, url_part(image)))

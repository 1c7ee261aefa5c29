"""A server process on a GPU, with graphs."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load, load_file

from tests.support.app import encode_image
from tests.support.process import Process

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("graphs", "num_servers"), [(True, 2), (False, 1)])
def test_serves_by_replay_or_eagerly(graphs: bool, num_servers: int) -> None:
    flag = "--cudagraph-mm-encoder" if graphs else "--no-cudagraph-mm-encoder"
    servers = ("--api-server-count", str(num_servers))
    process = Process("--port", "0", "--device", "cuda", "--cache-bytes", "0", flag, *servers)
    try:
        url = process.ready().url
        image = encode_image(300, 400)
        answers = [
            httpx.post(f"{url}/embed", content=image, headers={"content-type": "image/png"}, timeout=60)
            for _ in range(3)
        ]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert len({str(answer.json()["data"]) for answer in answers}) == 1
        info = httpx.get(f"{url}/info").json()
        assert info["encoder_cudagraph"]["enabled"] == graphs
        assert info["attn_backend"].startswith("FLASH_ATTN")
        metrics = httpx.get(f"{url}/metrics").text
        hits = 'vision_sidecar_encoder_cudagraph_hits_total{device="cuda:0"}'
        assert f"{hits} {3.0 if graphs else 0.0}" in metrics
    finally:
        process.kill()


def test_tokens_that_are_handed_over_are_those_of_the_encoder(tmp_path: Path) -> None:
    folder = str(tmp_path / "tokens")
    process = Process("--port", "0", "--device", "cuda", "--api-server-count", "2", "--handoff-dir", folder)
    try:
        url = process.ready().url
        for size in ((300, 400), (1024, 1024)):
            image, headers = encode_image(*size), {"content-type": "image/png"}
            query = "pooling=none&deepstack=true&format=safetensors&dtype=bfloat16"
            expected = httpx.post(f"{url}/embed?{query}", content=image, headers=headers, timeout=60)
            answer = httpx.post(f"{url}/embed?format=handoff", content=image, headers=headers, timeout=60)
            [item] = answer.raise_for_status().json()["data"]
            tokens = load_file(f"{folder}/{item['uuid']}.safetensors")["tokens"]
            assert torch.equal(tokens, load(expected.content)["embeddings"])
    finally:
        process.kill()

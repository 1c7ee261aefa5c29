"""A server process on a GPU, with graphs."""

from __future__ import annotations

import httpx
import pytest

from tests.support.app import encode_image
from tests.support.process import Process

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("graphs", "num_servers"), [(True, 2), (False, 1)])
def test_serves_by_replay_or_eagerly(graphs: bool, num_servers: int) -> None:
    flag = "--cudagraph-mm-encoder" if graphs else "--no-cudagraph-mm-encoder"
    servers = ("--api-server-count", str(num_servers))
    process = Process("--port", "0", "--device", "cuda", flag, *servers)
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

"""`format=handoff` and `/handoff/{uuid}` through the whole app."""

from __future__ import annotations

import asyncio
import base64
import errno
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load, load_file

from models import EncodeItem
from service.config.settings import Settings
from service.handoff.folder import open_handoff_folder
from service.routes.schemas import HandoffResponse
from tests.support.answers import error_of
from tests.support.app import FINGERPRINT, FakeEncoder, Service, encode_image, only
from tests.support.waiting import eventually

Serve = Callable[..., Service]
HANDOFF = "?format=handoff"


@pytest.fixture
def service(serve: Serve, with_store: Settings) -> Service:
    return serve(with_store)


def uuids(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    HandoffResponse.model_validate(answer.json())
    return [item["uuid"] for item in answer.json()["data"]]


def waiting_for(gate: threading.Event) -> Callable[[Sequence[EncodeItem]], None]:
    def wait(items: Sequence[EncodeItem]) -> None:
        assert gate.wait(10)

    return wait


def file_of(settings: Settings, uuid: str) -> Path:
    assert settings.handoff_dir is not None
    return settings.handoff_dir / f"{uuid}.safetensors"


def tokens_of(service: Service, image: bytes) -> torch.Tensor:
    query = "?pooling=none&deepstack=true&format=safetensors"
    return load(service.embed(image, query).content)["embeddings"]


def test_full_file_system_is_a_full_store(serve: Serve, with_store: Settings) -> None:
    room = [False]

    def fail(items: Sequence[EncodeItem]) -> None:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    service = serve(with_store, encoders=[FakeEncoder(fail)])
    answer = service.embed(encode_image(), HANDOFF)
    assert error_of(answer) == (429, "handoff_full", None)
    assert answer.headers["retry-after"] == "1"
    room[0] = True
    assert service.embed(encode_image(), HANDOFF).status_code == 200


def test_tokens_are_in_the_store_and_the_answer_says_where(service: Service, with_store: Settings) -> None:
    image = encode_image(64, 96)
    answer = service.embed(image, HANDOFF)
    [uuid] = uuids(answer)
    path = file_of(with_store, uuid)
    body = answer.json()
    assert body["data"] == [
        {
            "uuid": uuid,
            "grid_thw": [1, 4, 6],
            "num_tokens": 6,
            "width": 12,
            "dtype": "float32",
            "bytes": path.stat().st_size,
        }
    ]
    assert (body["fingerprint"], body["usage"]) == (FINGERPRINT, {"num_images": 1, "num_tokens": 6})
    assert torch.equal(load_file(path)["tokens"], tokens_of(service, image))


def test_uuid_is_that_of_the_content_part_for_vllm(service: Service) -> None:
    image = encode_image()
    [part] = service.embed(image, "?format=vllm").json()["content"]
    assert uuids(service.embed(image, HANDOFF)) == [part["uuid"]]


def test_image_that_was_seen_is_neither_decoded_nor_encoded(service: Service) -> None:
    image = encode_image()
    first, second = service.embed(image, HANDOFF), service.embed(image, HANDOFF)
    assert first.json() == second.json()
    assert len(service.encoder.batches) == 1
    assert "cache;desc=hit" not in first.headers["server-timing"]
    assert second.headers["server-timing"].startswith("cache;desc=hit, ")
    assert "decode" not in second.headers["server-timing"]
    assert service.metric("cache_misses_total", kind="tokens") == 1
    assert service.metric("cache_hits_total", kind="tokens") == 1
    assert service.metric("images_total") == 1


def test_only_the_new_images_of_a_request_are_encoded(service: Service) -> None:
    a, b, c = (encode_image(seed=seed) for seed in range(3))
    service.embed(a, HANDOFF)
    answer = service.embed_form(b, a, c, b, query=HANDOFF)
    found = uuids(answer)
    assert found[0] == found[3]
    assert len(set(found)) == 3
    assert service.metric("images_total") == 3
    assert "cache;desc=hit" not in answer.headers["server-timing"]
    assert service.metric("cache_hits_total", kind="tokens") == 2


def test_error_names_the_image_of_the_request_not_of_those_that_are_encoded(service: Service) -> None:
    good = encode_image()
    service.embed(good, HANDOFF)
    answer = service.embed_form(good, good, b"no image", query=HANDOFF)
    assert error_of(answer) == (400, "invalid_image", "images[2]")
    assert service.metric("handoff_entries") == 1


def test_failure_leaves_no_claim_and_no_room_taken(serve: Serve, with_store: Settings) -> None:
    def fail(items: Sequence[EncodeItem]) -> None:
        raise ValueError("broken")

    service = serve(with_store, encoders=[FakeEncoder(fail)])
    assert error_of(service.embed(encode_image(), HANDOFF)) == (500, "internal_error", "images[0]")
    assert with_store.handoff_dir is not None
    assert [path.name for path in with_store.handoff_dir.iterdir() if path.name[0] != "."] == []
    assert service.metric("handoff_bytes") == 0


def test_tokens_that_are_not_finite_are_not_stored(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.support.app.known_embedding", lambda patches, output: torch.full((6, 12), float("nan"))
    )
    assert error_of(service.embed(encode_image(), HANDOFF)) == (500, "non_finite_output", "images[0]")


def test_requests_at_the_same_time_share_one_encode(serve: Serve, with_store: Settings) -> None:
    gate = threading.Event()
    service = serve(with_store, encoders=[FakeEncoder(waiting_for(gate))])
    image = encode_image()

    async def requests() -> list[httpx.Response]:
        headers = {"content-type": "image/png"}
        sent = [
            asyncio.create_task(service._client.post("/embed" + HANDOFF, content=image, headers=headers))
            for _ in range(5)
        ]
        while not service.encoder.batches:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        gate.set()
        return await asyncio.gather(*sent)

    answers = service.runner.run(requests())
    assert {answer.status_code for answer in answers} == {200}
    assert service.metric("images_total") == 1


def test_full_store_is_429_with_retry_after(serve: Serve, settings: Settings, tmp_path: Path) -> None:
    small = only(settings, handoff_dir=tmp_path / "tokens", handoff_bytes=1000, handoff_lease_s=100)
    with open_handoff_folder(small):
        service = serve(small)
        uuids(service.embed(encode_image(seed=1), HANDOFF))
        answer = service.embed(encode_image(seed=2), HANDOFF)
        assert error_of(answer) == (429, "handoff_full", None)
        assert answer.headers["retry-after"] == "10"
        assert service.engine.batcher.reserved_tokens == 0
        large = service.embed(encode_image(320, 320), HANDOFF)
        assert error_of(large) == (413, "too_many_tokens", None)


def test_handing_over_without_a_store_is_refused(serve: Serve) -> None:
    service = serve()
    assert error_of(service.embed(encode_image(), HANDOFF)) == (400, "invalid_option", "format")
    assert service.get("/handoff/vs1-" + "0" * 64).status_code == 404


@pytest.mark.parametrize("option", ["dtype=float16", "pooling=mean", "deepstack=false", "normalize=true"])
def test_option_that_would_change_the_tokens_conflicts(service: Service, option: str) -> None:
    answer = service.embed(encode_image(), f"{HANDOFF}&{option}")
    assert error_of(answer) == (400, "option_conflict", option.partition("=")[0])


def test_file_is_served_whole_and_in_ranges(service: Service, with_store: Settings) -> None:
    [uuid] = uuids(service.embed(encode_image(), HANDOFF))
    data = file_of(with_store, uuid).read_bytes()
    url = f"/handoff/{uuid}"
    whole = service.get(url)
    assert (whole.status_code, whole.content) == (200, data)
    assert whole.headers["content-type"] == "application/x-safetensors"
    assert whole.headers["etag"] == f'"{uuid}"'
    assert whole.headers["last-modified"] == "Thu, 01 Jan 1970 00:00:00 GMT"
    part = service.get(url, headers={"range": "bytes=500-519", "if-range": f'"{uuid}"'})
    assert (part.status_code, part.content) == (206, data[500:520])
    assert part.headers["content-range"] == f"bytes 500-519/{len(data)}"
    assert service.get(url, headers={"range": f"bytes={len(data)}-"}).status_code == 416
    head = service.request("HEAD", url)
    assert (head.status_code, head.headers["content-length"], head.content) == (200, str(len(data)), b"")
    assert service.metric("handoff_reads_total") >= 2


def test_deleted_file_is_gone_and_is_encoded_again(service: Service) -> None:
    image = encode_image()
    [uuid] = uuids(service.embed(image, HANDOFF))
    assert service.request("DELETE", f"/handoff/{uuid}").status_code == 204
    for method in ("GET", "HEAD", "DELETE"):
        answer = service.request(method, f"/handoff/{uuid}")
        assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "handoff_not_found"
    assert uuids(service.embed(image, HANDOFF)) == [uuid]
    assert service.metric("images_total") == 2


@pytest.mark.parametrize("name", ["%2e%2e", "..%2f.ledger", ".ledger", "vs1-" + "0" * 64, "x" * 300, "%00"])
def test_nothing_but_an_entry_is_served(service: Service, name: str) -> None:
    for method in ("GET", "DELETE"):
        assert service.request(method, f"/handoff/{name}").status_code == 404


def test_store_needs_the_key(serve: Serve, with_store: Settings) -> None:
    service = serve(only(with_store, api_keys="sk-1"))
    url = "/handoff/vs1-" + "0" * 64
    assert service.get(url).status_code == 401
    assert service.get(url, headers={"authorization": "Bearer sk-1"}).status_code == 404


def test_pooled_vectors_are_kept_too(serve: Serve, settings: Settings) -> None:
    service = serve(only(settings, cache_bytes=2**20))
    image = encode_image()
    first, second = service.embed(image), service.embed(image)
    assert first.content == second.content
    assert second.headers["server-timing"].startswith("cache;desc=hit, ")
    assert len(service.encoder.batches) == 1
    assert service.embed(image, "?normalize=false").json()["data"] != first.json()["data"]
    assert len(service.encoder.batches) == 2
    openai = service.request("POST", "/v1/embeddings", json={"input": base64.b64encode(image).decode()})
    assert openai.json()["data"][0]["embedding"] == first.json()["data"][0]["embedding"]
    assert len(service.encoder.batches) == 2
    assert service.metric("cache_hits_total", kind="vector") == 2


def test_limit_on_json_floats_counts_kept_images_too(
    serve: Serve, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.answers.answer_options.MAX_JSON_FLOATS", 7)
    service = serve(only(settings, cache_bytes=2**20))
    image = encode_image()
    assert service.embed(image).status_code == 200
    answer = service.embed_form(image, image)
    assert error_of(answer) == (400, "response_too_large", "encoding_format")


def test_caller_who_leaves_does_not_take_the_tokens_from_others(serve: Serve, with_store: Settings) -> None:
    gate = threading.Event()
    service = serve(with_store, encoders=[FakeEncoder(waiting_for(gate))])
    blocker, image = encode_image(seed=5), encode_image()

    async def requests() -> httpx.Response:
        headers = {"content-type": "image/png"}

        def post(data: bytes) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(
                service._client.post("/embed" + HANDOFF, content=data, headers=headers)
            )

        blocking = post(blocker)
        while not service.encoder.batches:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        leaving, staying = post(image), post(image)
        while len(service.encoder.batches) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        leaving.cancel()
        await asyncio.sleep(0.01)
        gate.set()
        await blocking
        return await staying

    assert service.runner.run(requests()).status_code == 200
    eventually(lambda: service.engine.is_idle)
    assert service.metric("handoff_entries") == 2

"""vLLM's connector with the store on the same host, without vLLM. `make check-vllm` runs it in vLLM."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.vllm_connector import (
    GRID,
    NUM_TOKENS,
    UUID,
    WIDTH,
    Chat,
    Factory,
    Feature,
    Role,
    Scheduler,
    Value,
    chat,
    connector_module,
    load,
    open_tokens,
    store,
    vllm_config,
)
from tests.support.waiting import eventually

OTHER = "vs1-" + "f" * 64
SIZE = NUM_TOKENS * WIDTH * 4
MakeScheduler = Callable[..., Scheduler]


@pytest.fixture
def gate(connector: Any, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Files are not read before it is set."""
    event = threading.Event()
    read = connector.Tokens.read
    monkeypatch.setattr(connector.Tokens, "read", lambda file: event.wait(20) and read(file))
    return event


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "either `dir` or `url`"),
        ({"dir": "/a", "url": "http://a"}, "either `dir` or `url`"),
        ({"dir": "tokens"}, "`dir` .* not an absolute path"),
        ({"url": "ftp://a"}, "`url` .* not an http or https URL"),
        ({"url": "http://"}, "`url` .* not an http or https URL"),
        ({"url": "http://a?b"}, "`url` .* not an http or https URL"),
        ({"dir": "/a", "folder": 1}, "has no setting 'folder'"),
        ({"dir": "/a", "timeout_s": 0}, "`timeout_s` .* not a positive number"),
        ({"dir": "/a", "timeout_s": "1"}, "`timeout_s` .* not a positive number"),
        ({"dir": "/a", "max_bytes": True}, "`max_bytes` .* not a positive number"),
        ({"dir": "/a", "role": "ec_producer"}, "ec_consumer"),
        ({"dir": "/a", "role": "ec_both"}, "ec_consumer"),
    ],
)
def test_wrong_configuration_stops_the_start(connector: Any, extra: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        connector.VisionSidecarConnector(vllm_config(**extra), Role.WORKER)


@pytest.mark.parametrize(("version", "is_supported"), [("0.32.0", True), ("0.32.1", True), ("0.33.0", False)])
@pytest.mark.parametrize("role", Role)
def test_other_versions_of_vllm_are_refused_at_start(version: str, is_supported: bool, role: Role) -> None:
    with connector_module(version) as module:
        if is_supported:
            module.VisionSidecarConnector(vllm_config(dir="/a"), role).shutdown()
        else:
            with pytest.raises(ValueError, match=r"supports vLLM 0\.32, not 0\.33\.0"):
                module.VisionSidecarConnector(vllm_config(dir="/a"), role)


def test_name_is_known_where_the_file_is_installed(connector: Any) -> None:
    connector.register()
    registered = {"VisionSidecarConnector": ("vision_sidecar_connector", "VisionSidecarConnector")}
    assert Factory.registered == registered


@pytest.mark.parametrize("num_tokens", [NUM_TOKENS, 300_000])  # of one part, and of four
def test_workers_load_what_the_store_has(
    connector: Any, scheduler: MakeScheduler, tmp_path: Path, num_tokens: int
) -> None:
    tokens = store(tmp_path, num_tokens=num_tokens)
    vllm = scheduler(dir=str(tmp_path))
    loads = vllm.until(chat(num_tokens=num_tokens))
    (tmp_path / f"{UUID}.safetensors").unlink()  # the store may drop it from now on
    assert torch.equal(load(connector, loads)[UUID], tokens)
    assert torch.equal(load(connector, loads, torch.bfloat16)[UUID], tokens.bfloat16())
    stats = vllm.connector.get_ec_connector_stats().data
    assert (stats["bytes"], stats["loads"]) == (stats["loads"] * num_tokens * WIDTH * 4, stats["loads"])
    assert stats["loads"] > 0


def test_request_waits_until_all_its_images_are_open(
    connector: Any, scheduler: MakeScheduler, tmp_path: Path, gate: threading.Event
) -> None:
    vllm = scheduler(dir=str(tmp_path))
    both = Chat("a", [Feature(UUID, NUM_TOKENS), Feature(OTHER, NUM_TOKENS, offset=10)])
    expected = {UUID: store(tmp_path), OTHER: store(tmp_path, OTHER)}
    for _ in range(3):
        assert vllm.step(both).tokens == {}
    gate.set()
    loaded = load(connector, vllm.until(both))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[uuid], expected[uuid]) for uuid in expected)


def test_missing_tokens_fail_their_request_alone(
    connector: Any, scheduler: MakeScheduler, tmp_path: Path
) -> None:
    tokens = store(tmp_path, OTHER)
    vllm = scheduler(dir=str(tmp_path))
    missing, present = chat(name="missing"), chat(OTHER, name="present")
    loads = vllm.until(missing, present)
    assert vllm.connector.take_unavailable_requests() == {"missing"}
    assert torch.equal(load(connector, loads)[OTHER], tokens)
    vllm.connector.request_finished(missing)
    tokens = store(tmp_path)  # the next request finds them
    assert torch.equal(load(connector, vllm.until(chat(name="again")))[UUID], tokens)


def test_images_that_are_computed_or_in_the_request_are_not_opened(
    scheduler: MakeScheduler, tmp_path: Path
) -> None:
    vllm = scheduler(dir=str(tmp_path))
    ensure = vllm.connector.ensure_cache_available
    assert ensure(chat(name="computed"), NUM_TOKENS)
    assert not ensure(chat(name="a", offset=1), NUM_TOKENS)
    for name in ("pixel_values", "pixel_values_videos", "video_embeds", "input_features"):
        data = {name: Value(torch.ones(1)), "image_grid_thw": Value(GRID)}
        assert ensure(chat("any", name="b", data=data), 0)
    assert ensure(chat("any", name="b", data={"image_embeds": Value(torch.ones(NUM_TOKENS, WIDTH))}), 0)
    without: list[Any] = [None, {}, {"image_embeds": Value(None), "image_grid_thw": Value(GRID)}]
    for number, nothing in enumerate(without):
        assert not ensure(chat("any", name=f"c{number}", data=nothing), 0)
    assert vllm.connector.take_unavailable_requests() - {"a"} == {"c0", "c1", "c2"}


def test_files_stay_open_until_no_worker_can_need_them(scheduler: MakeScheduler, tmp_path: Path) -> None:
    store(tmp_path)
    vllm = scheduler(dir=str(tmp_path))
    request, second = chat(), chat(name="b")
    vllm.until(request, second)
    vllm.idle()  # the requests run: their images may be needed in any later step
    assert open_tokens() == 1
    vllm.connector.request_finished(request)
    vllm.idle()
    assert open_tokens() == 1
    loads = vllm.step(second)
    assert vllm.step(second, num_computed=NUM_TOKENS).tokens == {}
    vllm.idle(3)
    assert Path(loads.tokens[UUID][0]).exists()  # a worker may load it only now
    vllm.idle()
    assert open_tokens() == 0


def test_request_that_ends_while_its_tokens_are_opened_leaves_nothing_open(
    scheduler: MakeScheduler, tmp_path: Path, gate: threading.Event
) -> None:
    store(tmp_path)
    vllm = scheduler(dir=str(tmp_path))
    vllm.step(chat(), chat(OTHER, name="missing"))
    vllm.connector.request_finished(chat())
    vllm.connector.request_finished(chat(OTHER, name="missing"))
    vllm.idle()
    gate.set()

    def is_empty() -> bool:
        vllm.idle(1)
        return not vllm.connector._items

    eventually(is_empty)
    assert open_tokens() == 0
    assert vllm.connector.take_unavailable_requests() == set()


def test_requests_that_wait_hold_a_bounded_number_of_bytes(
    scheduler: MakeScheduler, tmp_path: Path, gate: threading.Event
) -> None:
    uuids = [f"vs1-{number:064x}" for number in range(10)]
    for uuid in uuids:
        store(tmp_path, uuid)
    vllm = scheduler(dir=str(tmp_path), max_bytes=3 * SIZE)
    first, *others = [Chat("first", [Feature(uuid, NUM_TOKENS) for uuid in uuids[:5]])] + [
        chat(uuid, name=uuid) for uuid in uuids[5:]
    ]
    for _ in range(50):
        vllm.step(*others)
    assert len(vllm.connector._items) == 3
    gate.set()
    for other in others:
        vllm.connector.request_finished(other)
    vllm.until(first)  # it needs more than the limit, and must not wait for ever
    vllm.idle()
    assert open_tokens() == 5


def test_shutdown_closes_all_files(scheduler: MakeScheduler, tmp_path: Path) -> None:
    store(tmp_path)
    vllm = scheduler(dir=str(tmp_path))
    vllm.until(chat())
    assert open_tokens() == 1
    vllm.connector.shutdown()
    assert open_tokens() == 0


def test_counters_are_registered_and_counted(
    connector: Any, scheduler: MakeScheduler, tmp_path: Path
) -> None:
    from prometheus_client import REGISTRY, Counter

    labels = {"model_name": "m", "engine": "0"}
    metrics = connector.VisionSidecarConnector.build_prom_metrics(
        vllm_config(), Counter, [*labels], {0: [*labels.values()]}
    )
    vllm = scheduler(dir=str(tmp_path))
    assert vllm.failure(chat()) == "not_found"
    vllm.connector._stats.count("not_found", 2)
    store(tmp_path)
    vllm.until(chat())
    stats = vllm.connector.get_ec_connector_stats()
    rebuilt = vllm.connector.build_ec_connector_stats(json.loads(json.dumps(stats.data)))
    more = vllm.connector.build_ec_connector_stats({"not_found": 1})
    rebuilt.aggregate(more)
    assert vllm.connector.get_ec_connector_stats().is_empty()
    metrics.observe(rebuilt.reduce())
    found = [
        REGISTRY.get_sample_value(f"vllm:vision_sidecar_{name}_total", {**labels, **more})
        for name, more in (
            ("images", {}),
            ("bytes", {}),
            ("failures", {"reason": "not_found"}),
            ("failures", {"reason": "misfit"}),
        )
    ]
    assert found == [stats.data["loads"], stats.data["bytes"], 3, 0]

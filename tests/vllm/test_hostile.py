"""Missing, wrong or broken tokens, and uuids that no service gave: only their request fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.support.sidecar import Sidecar, tokens_part
from tests.support.vllm_chats import (
    Part,
    ask,
    body_of,
    check_equal,
    check_error,
    messages_of,
    photo,
    read_answer,
    send,
    url_part,
)
from tests.support.vllm_lab import Lab
from tests.support.vllm_server import VllmServer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.parametrize("lab", ["qwen3_vl"], indirect=True),
]

GRID = [1, 16, 16]
NUM_TOKENS, WIDTH = 64, 192  # of a photograph of that grid
NO_UUIDS = {
    "a path": "../../../etc/passwd",
    "a path behind the prefix": "vs1-" + "../" * 20 + "aaaa",
    "an absolute path": "/etc/passwd",
    "300 characters": "x" * 300,
    "no hex digits": "vs1-" + "g" * 64,
    "upper case": "vs1-" + "A" * 64,
    "65 digits": "vs1-" + "0" * 65,
    "a line end": "vs1-" + "0" * 64 + "\n",
    "a NUL": "vs1-" + "0" * 63 + "\0",
    "a query": "vs1-" + "0" * 64 + "?x=1",
}


@dataclass(frozen=True)
class Way:
    """A server with the connector, and the store that it reads."""

    vllm: VllmServer
    sidecar: Sidecar

    def check_fails_alone(self, *parts: Part) -> None:
        """Fails unless a chat with these parts fails, while others beside it and after it do not."""
        good = self.sidecar.hand_over([photo(2000, 320, 320)])
        expected = ask(self.vllm.url, *good)
        with ThreadPoolExecutor() as threads:
            bodies = [body_of(messages_of(*parts)), *[body_of(messages_of(*good))] * 2]
            bad, *others = threads.map(lambda body: send(self.vllm.url, body), bodies)
        check_error(bad)
        for other in others:
            check_equal(read_answer(other), expected)
        assert self.vllm.is_healthy()
        new = self.sidecar.hand_over([photo(2001, 256, 320)])
        assert ask(self.vllm.url, *new).num_prompt_tokens > NUM_TOKENS
        self.sidecar.delete(new[0]["uuid"])

    def failures(self, reason: str) -> float:
        return self.vllm.metric("vision_sidecar_failures_total", reason=reason)


@pytest.fixture(params=["from a folder", "over HTTP"])
def way(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Way]:
    way = Way(lab.by_dir, lab.near) if request.param == "from a folder" else Way(lab.by_url, lab.far)
    yield way
    assert way.vllm.is_healthy()


def uuid_of(number: int) -> str:
    """The uuid of no image."""
    return f"vs1-{number:064x}"


def test_missing_tokens(way: Way) -> None:
    before = way.failures("not_found")
    way.check_fails_alone(tokens_part(uuid_of(1), GRID))
    assert way.failures("not_found") == before + 1


def test_one_of_three_is_missing(way: Way) -> None:
    first, last = way.sidecar.hand_over([photo(2010), photo(2011)])
    way.check_fails_alone(first, tokens_part(uuid_of(2), GRID), last)


@pytest.mark.parametrize("uuid", NO_UUIDS.values(), ids=NO_UUIDS)
def test_uuids_that_nobody_gave(way: Way, uuid: str) -> None:
    before = way.failures("invalid_uuid")
    way.check_fails_alone(tokens_part(uuid, GRID))
    assert way.failures("invalid_uuid") == before + 1


@pytest.mark.parametrize("grid", [[1, 16, 18], [1, 8, 8], [1, 64, 64]])
def test_tokens_of_another_grid(lab: Lab, way: Way, grid: list[int]) -> None:
    before = way.failures("misfit")
    image = photo(2020 + grid[-1], 256, 256)
    [part] = way.sidecar.hand_over([image])
    way.check_fails_alone(tokens_part(part["uuid"], grid))
    assert way.failures("misfit") == before + 1
    check_equal(ask(way.vllm.url, part), ask(lab.plain.url, url_part(image)))


def test_grid_of_as_many_tokens_leaves_no_wrong_prefix(lab: Lab, way: Way) -> None:
    image = photo(2060, 512, 512)
    [part] = way.sidecar.hand_over([image])
    assert part["image_embeds"]["image_grid_thw"] == [1, 32, 32]
    send(way.vllm.url, body_of(messages_of(tokens_part(part["uuid"], [1, 16, 64]))))
    check_equal(ask(way.vllm.url, part), ask(lab.plain.url, url_part(image)))


@pytest.mark.parametrize("grid", [[], [1, 16], [1, 0, 16], [1, -16, -16], [2**40, 16, 16], [1, 15, 16], "x"])
def test_grids_of_no_image(way: Way, grid: list[int]) -> None:
    way.check_fails_alone(tokens_part(uuid_of(3), grid))


def tokens_file(
    num_tokens: int = NUM_TOKENS, width: int = WIDTH, dtype: str = "F32", name: str = "tokens"
) -> bytes:
    """A whole file of tokens that are all 0."""
    size = num_tokens * width * 4
    header = json.dumps(
        {
            "__metadata__": {"grid_thw": json.dumps(GRID)},
            name: {"dtype": dtype, "shape": [num_tokens, width], "data_offsets": [0, size]},
        }
    )
    return len(header).to_bytes(8, "little") + header.encode() + bytes(size)


FILES: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "the first bytes": lambda: tokens_file()[:5],
    "within the header": lambda: tokens_file()[:40],
    "half": lambda: tokens_file()[: NUM_TOKENS * WIDTH * 2],
    "one byte too few": lambda: tokens_file()[:-1],
    "one byte too many": lambda: tokens_file() + b"x",
    "noise": lambda: photo(2030) * 4,
    "a header of 2 ** 63 bytes": lambda: b"\xff" * 7 + b"\x7f" + tokens_file()[8:],
    "deep JSON": lambda: (60000).to_bytes(8, "little") + b"[" * 60000,
    "no JSON": lambda: (8).to_bytes(8, "little") + b"\xff" * 8,
    "another width": lambda: tokens_file(width=WIDTH // 3),
    "other rows": lambda: tokens_file(num_tokens=NUM_TOKENS + 1),
    "another type": lambda: tokens_file(dtype="I32"),
    "another tensor": lambda: tokens_file(name="embeddings"),
}


@pytest.mark.parametrize("make", FILES.values(), ids=FILES)
def test_broken_file(way: Way, make: Callable[[], bytes]) -> None:
    number = 100 + list(FILES.values()).index(make)
    file = way.sidecar.store / f"{uuid_of(number)}.safetensors"
    file.write_bytes(make())
    before = way.failures("misfit")
    way.check_fails_alone(tokens_part(uuid_of(number), GRID))
    assert way.failures("misfit") == before + 1
    file.unlink()


def test_whole_file_is_loaded(way: Way) -> None:
    """The broken ones above differ from this one by what is broken."""
    file = way.sidecar.store / f"{uuid_of(99)}.safetensors"
    file.write_bytes(tokens_file())
    ask(way.vllm.url, tokens_part(uuid_of(99), GRID))
    file.unlink()

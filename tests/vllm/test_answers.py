"""Whichever way an image takes to vLLM, the answer is that of vLLM's own encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from tests.support.vllm_chats import TOLERANCE, Answer, ask, check_equal, photo, url_part
from tests.support.vllm_lab import CHUNK_TOKENS, Lab

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

SHAPES = [
    *((320, 320), (100, 900), (480, 640), (64, 64), (333, 517)),
    *((768, 256), (200, 199), (600, 400), (41, 300), (512, 512)),
]
CHATS = {
    "ten photographs": lambda seed: [[image] for image in photos(seed)],
    "three in a chat": lambda seed: [photos(seed + 20)[:3]],
    "twenty in a chat": lambda seed: [[photo(seed + 40 + n, 192 + 8 * (n % 5)) for n in range(20)]],
}


def photos(seed: int) -> list[bytes]:
    """Ten photographs, each of another shape."""
    return [photo(seed + number, *shape) for number, shape in enumerate(SHAPES)]


def own(lab: Lab, images: Sequence[bytes]) -> Answer:
    """The answer of stock vLLM with its own encoder."""
    return ask(lab.plain.url, *map(url_part, images))


def through_the_door(lab: Lab, images: Sequence[bytes]) -> Answer:
    return ask(lab.near.url, *map(url_part, images))


def by_uuid_from_a_folder(lab: Lab, images: Sequence[bytes]) -> Answer:
    return ask(lab.by_dir.url, *lab.near.hand_over(images))


def by_uuid_over_http(lab: Lab, images: Sequence[bytes]) -> Answer:
    return ask(lab.by_url.url, *lab.far.hand_over(images))


def tensors_in_the_body(lab: Lab, images: Sequence[bytes]) -> Answer:
    return ask(lab.plain.url, *lab.near.tensors(images))


WAYS: list[Callable[[Lab, Sequence[bytes]], Answer]] = [
    through_the_door,
    by_uuid_from_a_folder,
    by_uuid_over_http,
    tensors_in_the_body,
]


@pytest.mark.parametrize("chats", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_answers_are_those_of_vllms_own_encoder(
    lab: Lab,
    way: Callable[[Lab, Sequence[bytes]], Answer],
    chats: Callable[[int], Sequence[Sequence[bytes]]],
    report: Callable[[str], None],
    request: pytest.FixtureRequest,
) -> None:
    seed = 100 * WAYS.index(way)  # images that no other way has sent, so that no server has kept them
    worst = max(check_equal(way(lab, images), own(lab, images)) for images in chats(seed))
    name = request.node.callspec.id
    report(f"{name}: tokens equal, log-probabilities within {worst:.1e}")


def test_answers_depend_on_the_images(lab: Lab) -> None:
    """Else equal answers would show nothing."""
    firsts = sorted(own(lab, [image]).logprobs[0] for image in photos(0))
    assert min(later - earlier for earlier, later in pairwise(firsts)) > TOLERANCE


@pytest.mark.parametrize("lab", ["qwen3_vl"], indirect=True)
def test_an_image_may_be_longer_than_several_steps(lab: Lab) -> None:
    images = [photo(900, 1024, 1024), photo(901, 640, 640)]
    answer = by_uuid_over_http(lab, images)
    assert answer.num_prompt_tokens > 5 * CHUNK_TOKENS
    check_equal(answer, own(lab, images))

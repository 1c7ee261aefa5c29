"""Pooled vectors in memory: what is kept, and what is dropped first."""

from __future__ import annotations

import torch

from models import OutputSpec
from service.answers.answer import ImageFacts
from service.handoff.vector_cache import EmbeddedImage, VectorCache, VectorKey

OUTPUT = OutputSpec(pooled=True, deepstack=False)
FACTS = ImageFacts(6, (1, 4, 6), 96, 64, "0" * 64)
ENTRY_BYTES = 4 * 256 + 1024


def image(value: float) -> EmbeddedImage:
    return EmbeddedImage(FACTS, torch.full((256,), float(value)))


def key(name: str, output: OutputSpec = OUTPUT) -> VectorKey:
    return VectorKey(name, output)


def test_the_same_vector_comes_back() -> None:
    cache = VectorCache(10 * ENTRY_BYTES)
    assert cache.find(key("a")) is None
    given = image(1.5)
    cache.put(key("a"), given)
    found = cache.find(key("a"))
    assert found is not None
    assert found.facts == FACTS
    assert torch.equal(found.embedding, given.embedding)


def test_another_output_is_another_vector() -> None:
    cache = VectorCache(10 * ENTRY_BYTES)
    cache.put(key("a"), image(1))
    for output in (
        OutputSpec(pooled=True, normalize=True, deepstack=False),
        OutputSpec(pooled=True, deepstack=False, dtype=torch.float16),
    ):
        assert cache.find(key("a", output)) is None


def test_vectors_that_were_used_last_are_kept() -> None:
    cache = VectorCache(3 * ENTRY_BYTES)
    for name in "abc":
        cache.put(key(name), image(1))
    cache.find(key("a"))
    cache.put(key("d"), image(1))
    assert [name for name in "abcd" if cache.find(key(name))] == ["a", "c", "d"]


def test_vector_larger_than_the_cache_is_not_kept_and_drops_nothing() -> None:
    cache = VectorCache(ENTRY_BYTES)
    cache.put(key("a"), image(1))
    cache.put(key("b"), EmbeddedImage(FACTS, torch.zeros(10_000)))
    assert cache.find(key("a")) is not None
    assert cache.find(key("b")) is None


def test_kept_vector_does_not_hold_the_memory_of_its_batch() -> None:
    cache = VectorCache(10 * ENTRY_BYTES)
    batch = torch.zeros(64, 256)
    cache.put(key("a"), EmbeddedImage(FACTS, batch[3]))
    found = cache.find(key("a"))
    assert found is not None
    assert found.embedding.untyped_storage().nbytes() == 4 * 256

"""Tokens that go to a sink in place of the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import numpy as np
import pytest
import torch

from models import EncodeItem, OutputSpec, Patches, VisionEncoder, write_tokens
from models.cudagraph import EncoderCounts
from models.readback import RunningBatch, select_outputs


@pytest.fixture(scope="module")
def demo() -> VisionEncoder:
    return VisionEncoder.from_pretrained("demo", device="cpu")


def images(encoder: VisionEncoder) -> list[Patches]:
    rng = np.random.default_rng(0)
    return [encoder.preprocess(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in SIZES]


SIZES = [(256, 256), (300, 500), (640, 480)]


class Kept:
    """A sink that keeps a copy of its rows, part by part."""

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self._parts: list[tuple[int, torch.Tensor]] = []

    def open(self, rows: torch.Tensor) -> Kept:
        self._open = rows
        return self

    def parts(self) -> Sequence[Callable[[], None]]:
        return [partial(self._keep, index) for index in range(len(self._open))]

    def _keep(self, index: int) -> None:
        self._parts.append((index, self._open[index].clone()))

    def commit(self) -> None:
        self.rows = torch.stack([row for _, row in sorted(self._parts, key=lambda part: part[0])])

    def discard(self) -> None:
        self._parts.clear()


def test_sinks_take_the_tokens_in_place_of_results(demo: VisionEncoder) -> None:
    patches = images(demo)
    expected = demo.run([EncodeItem(image, OutputSpec()) for image in patches]).embeddings
    sinks = [Kept() if index % 2 else None for index in range(len(patches))]
    result = demo.run(
        [EncodeItem(image, OutputSpec(), sink) for image, sink in zip(patches, sinks, strict=True)]
    )
    for sink, tokens, embedding in zip(sinks, expected, result.embeddings, strict=True):
        if sink is None:
            assert torch.equal(embedding, tokens)
        else:
            assert sink.rows is not None
            assert torch.equal(sink.rows, tokens)
            assert torch.equal(embedding, tokens.abs().max().reshape(1))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_tokens_that_are_not_finite_do_not_reach_their_sink(demo: VisionEncoder, number: float) -> None:
    items = [EncodeItem(image, OutputSpec(), Kept()) for image in images(demo)[:2]]
    lengths = [item.patches.num_tokens for item in items]
    tokens = torch.ones(1, sum(lengths), demo.hidden_size)
    tokens[0, lengths[0], 3] = number  # the first token of the second image
    running = RunningBatch(2, demo.stream)
    for group in select_outputs(tokens, [0, 1], items, demo.kernels, torch.float32):
        running.read_back(group)
    running.launched(EncoderCounts(), num_tokens=sum(lengths))
    first, second = running.wait().embeddings
    assert first.tolist() == [1.0]
    assert not second.isfinite().any()
    assert [cast(Kept, item.sink).rows is None for item in items] == [False, True]


def test_failing_sink_discards_all_that_are_not_committed() -> None:
    class Failing(Kept):
        discarded = 0

        def _keep(self, index: int) -> None:
            raise OSError("full")

        def discard(self) -> None:
            Failing.discarded += 1

    rows = torch.ones(2, 3)
    good, bad = Kept(), Failing()
    with pytest.raises(OSError, match="full"):
        write_tokens([(good, rows), (bad, rows)])
    assert good.rows is None
    assert Failing.discarded == 1

"""Tokens that go to a sink in place of the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import numpy as np
import pytest
import torch

from models import EncodeItem, OutputSpec, Patches, VisionEncoder
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
        self.was_discarded = False
        self._parts: list[tuple[int, torch.Tensor]] = []

    def open(self, shape: tuple[int, int], dtype: torch.dtype) -> Kept:
        self.opened = shape, dtype
        return self

    def allocate(self, *, alone: bool) -> None:
        """Memory is there already."""
        self.was_alone = alone

    def parts(self, rows: torch.Tensor) -> Sequence[Callable[[], None]]:
        assert ((len(rows), rows.shape[1]), rows.dtype) == self.opened
        return [partial(self._keep, index, row) for index, row in enumerate(rows)]

    def _keep(self, index: int, row: torch.Tensor) -> None:
        self._parts.append((index, row.clone()))

    def commit(self) -> None:
        self.rows = torch.stack([row for _, row in sorted(self._parts, key=lambda part: part[0])])

    def discard(self) -> None:
        self.was_discarded = True


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


def test_sink_knows_whether_it_is_alone_in_the_batch(demo: VisionEncoder) -> None:
    first, second = images(demo)[:2]
    alone, others = Kept(), [Kept(), Kept()]
    demo.run([EncodeItem(first, OutputSpec(), alone)])
    demo.run([EncodeItem(*pair) for pair in zip((first, second), [OutputSpec()] * 2, others, strict=True)])
    assert [sink.was_alone for sink in (alone, *others)] == [True, False, False]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_tokens_that_are_not_finite_do_not_reach_their_sink(demo: VisionEncoder, number: float) -> None:
    items = [EncodeItem(image, OutputSpec(), Kept()) for image in images(demo)[:2]]
    lengths = [item.patches.num_tokens for item in items]
    tokens = torch.ones(1, sum(lengths), demo.hidden_size)
    tokens[0, lengths[0], 3] = number  # the first token of the second image
    sinks = [cast(Kept, item.sink) for item in items]
    for sink, length in zip(sinks, lengths, strict=True):
        sink.open((length, demo.hidden_size), torch.float32)
    running = RunningBatch(2, demo.stream, dict(enumerate(sinks)))
    for group in select_outputs(tokens, [0, 1], items, demo.kernels, torch.float32):
        running.read_back(group)
    running.launched(EncoderCounts(), num_tokens=sum(lengths))
    first, second = running.wait().embeddings
    assert first.tolist() == [1.0]
    assert not second.isfinite().any()
    assert [sink.rows is None for sink in sinks] == [False, True]


def test_failing_sink_fails_the_batch_and_nothing_is_left_open(demo: VisionEncoder) -> None:
    class Failing(Kept):
        def _keep(self, index: int, row: torch.Tensor) -> None:
            raise OSError("full")

    sinks = [Kept(), Failing()]
    items = [
        EncodeItem(image, OutputSpec(), sink) for image, sink in zip(images(demo)[:2], sinks, strict=True)
    ]
    with pytest.raises(OSError, match="full"):
        demo.run(items)
    assert [sink.rows for sink in sinks] == [None, None]
    assert all(sink.was_discarded for sink in sinks)


def test_sink_that_cannot_be_opened_fails_the_batch_and_closes_the_others(demo: VisionEncoder) -> None:
    class Unopened(Kept):
        def open(self, shape: tuple[int, int], dtype: torch.dtype) -> Kept:
            raise OSError("no files")

    sinks = [Kept(), Unopened()]
    items = [
        EncodeItem(image, OutputSpec(), sink) for image, sink in zip(images(demo)[:2], sinks, strict=True)
    ]
    with pytest.raises(OSError, match="no files"):
        demo.launch(items)
    assert sinks[0].was_discarded


def test_batch_that_fails_at_launch_discards_its_sinks(
    demo: VisionEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Kept()
    items = [EncodeItem(images(demo)[0], OutputSpec(), sink)]
    monkeypatch.setattr(demo.graphs, "run", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        demo.launch(items)
    assert sink.was_discarded

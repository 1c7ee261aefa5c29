"""Replay of captured budgets: order, counts, fall-backs."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from models import (
    EncoderCudaGraphManager,
    SupportsEncoderCudaGraph,
)
from models.cudagraph_protocol import ReplayBuffers
from tests.support.sum_encoder import CPU, SumEncoder, expected, images, manager


def check(manager: EncoderCudaGraphManager[list[list[float]]], batch: list[list[float]]) -> None:
    results = manager.execute(batch)
    assert len(results) == len(batch)
    for tokens, image in zip(results, batch, strict=True):
        assert torch.allclose(tokens, expected(image), rtol=1e-5, atol=1e-5)


def test_minimal_encoder_implements_the_protocol() -> None:
    assert isinstance(SumEncoder(), SupportsEncoderCudaGraph)
    assert not isinstance(object(), SupportsEncoderCudaGraph)


def test_budgets_are_captured_largest_first() -> None:
    model = SumEncoder()
    graphs = manager(model, budget_steps=1)
    assert graphs.budgets == (2, 4, 8, 16, 20)
    assert list(graphs.graphs) == [20, 16, 8, 4, 2]
    assert model.forwards[:5] == [20, 16, 8, 4, 2]
    assert graphs.max_images == 2  # at most the smallest budget


def test_budgets_share_their_buffers() -> None:
    graphs = manager(token_budgets=(6, 20))
    small, large = graphs.graphs[6], graphs.graphs[20]
    assert small.input_buffer.data_ptr() == large.input_buffer.data_ptr()
    assert small.output_buffer.data_ptr() == large.output_buffer.data_ptr()
    assert (len(small.input_buffer), len(small.output_buffer)) == (12, 6)
    assert (small.max_batch_size, large.max_batch_size) == (3, 6)


def test_batch_keeps_its_order_and_is_counted() -> None:
    graphs = manager(budget_steps=2, max_images_per_batch=2)
    check(graphs, images(7, 2, 12, 5, 2, 20))
    assert graphs.counts.hits == 6
    assert not graphs.counts.misses
    assert graphs.counts.replays == {4: 1, 12: 2, 20: 1}
    assert graphs.counts.padding_tokens == 0
    check(graphs, images(7))
    assert graphs.counts.padding_tokens == 1
    assert graphs.counts.replays[8] == 1


def test_image_over_every_budget_runs_eagerly() -> None:
    graphs = manager(token_budgets=(4, 8))
    check(graphs, images(9, 3, 30))
    assert (graphs.counts.hits, graphs.counts.misses) == (1, {"oversize": 2})


def test_without_settings_every_image_runs_eagerly() -> None:
    graphs = EncoderCudaGraphManager(SumEncoder(), None, CPU)
    check(graphs, images(9, 3, 30))
    assert (graphs.counts.hits, graphs.counts.misses) == (0, {"disabled": 3})
    assert not graphs.graphs


def test_data_of_an_earlier_batch_does_not_reach_a_later_one() -> None:
    graphs = manager(token_budgets=(4, 20))
    small = images(3)
    before = graphs.execute(small)[0]
    graphs.execute([[float("nan")] * 40])
    assert torch.equal(graphs.execute(small)[0], before)
    check(graphs, images(2, 2, 2, seed=1))


def test_results_survive_the_next_replay() -> None:
    graphs = manager(token_budgets=(4, 20))
    batch = images(4)
    (first,) = graphs.execute(batch)
    graphs.execute(images(4, seed=9))
    assert torch.allclose(first, expected(batch[0]))


def test_random_batches_are_exact_and_counted() -> None:
    graphs = manager(token_budgets=(4, 7, 13), max_images_per_batch=4)
    rng = np.random.default_rng(5)
    hits = oversize = 0
    for seed in range(300):
        sizes = [int(x) for x in rng.integers(1, 17, rng.integers(0, 9))]
        check(graphs, images(*sizes, seed=seed))
        hits += sum(size <= 13 for size in sizes)
        oversize += sum(size > 13 for size in sizes)
    assert (graphs.counts.hits, graphs.counts.misses["oversize"]) == (hits, oversize)


def raises(error: Exception) -> Callable[[], object]:
    def fail() -> object:
        raise error

    return fail


def write_too_many_values() -> None:
    np.zeros(2)[:] = np.zeros(3)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (raises(torch.OutOfMemoryError("no memory")), "no memory"),  # of the device
        # RuntimeError and MemoryError: no memory on the host, for torch and for numpy.
        (lambda: torch.empty(2**60, dtype=torch.uint8), "tried to allocate"),
        (lambda: np.empty(2**60, dtype=np.uint8), "Unable to allocate"),
        # RuntimeError and ValueError: shapes that do not fit, for torch and for numpy.
        (lambda: torch.zeros(3).split([1, 1]), "sum exactly to 3"),
        (write_too_many_values, "could not broadcast"),
    ],
)
def test_batch_that_cannot_be_loaded_runs_eagerly(
    fault: Callable[[], object], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = SumEncoder()
    graphs = manager(model, token_budgets=(4, 20))
    model.fault = fault
    check(graphs, images(3, 3))
    assert (graphs.counts.hits, graphs.counts.misses) == (0, {"error": 2})
    assert "a batch of 2 images runs eagerly: " in caplog.text
    assert message in caplog.text
    model.fault = None
    check(graphs, images(3, 3))
    assert graphs.counts.hits == 2


@pytest.mark.parametrize("error", [TypeError("no such argument"), KeyError("grids"), AssertionError("a bug")])
def test_bug_in_the_model_is_raised(error: Exception) -> None:
    model = SumEncoder()
    graphs = manager(model, token_budgets=(4, 20))
    model.fault = raises(error)
    with pytest.raises(type(error)):
        graphs.execute(images(3))
    assert not graphs.counts.misses


class Filling(SumEncoder):
    """Allocates memory before it fails to fill the buffers, and records whether an eager run finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[bool] = []
        self.fails = False

    def prepare_encoder_cudagraph_replay_buffers(
        self, batch: list[list[float]], buffers: ReplayBuffers
    ) -> None:
        activations = torch.zeros(4)
        self.allocated.append(weakref.ref(activations))
        if self.fails:
            raise torch.OutOfMemoryError("no memory")
        super().prepare_encoder_cudagraph_replay_buffers(batch, buffers)

    def encoder_eager_forward(self, batch: list[list[float]]) -> torch.Tensor:
        self.alive.append(any(tensor() is not None for tensor in self.allocated))
        return super().encoder_eager_forward(batch)


def test_memory_of_a_failed_load_is_free_in_the_eager_run(no_collection: None) -> None:
    model = Filling()
    graphs = manager(model, token_budgets=(4, 20))
    model.alive.clear()
    model.fails = True
    check(graphs, images(3, 3))
    assert model.alive == [False]


def test_fault_of_the_device_is_raised() -> None:
    model = SumEncoder()
    graphs = manager(model, token_budgets=(4, 20))
    model.fault = raises(torch.AcceleratorError("illegal access", 700))
    with pytest.raises(torch.AcceleratorError):
        graphs.execute(images(3))
    assert not graphs.counts.misses

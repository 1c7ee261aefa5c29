"""The manager with a minimal encoder and the vision transformer. On a CPU a replay calls the forward pass."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from models import (
    CudaGraphSettings,
    EncodeItem,
    EncoderCudaGraphManager,
    ModelError,
    OutputSpec,
    Patches,
    SupportsEncoderCudaGraph,
    VisionEncoder,
)
from models.cudagraph_protocol import EncoderCudaGraphConfig, MetadataSpec, ReplayBuffers
from models.warm_up import warm_up

CPU = torch.device("cpu")


class SumEncoder:
    """A tiny encoder that implements the protocol and nothing else.

    An image is a vector of numbers, two for each token. A token is the running sum of its image's pairs,
    times the image's factor. So a token depends on its neighbours and on the image's metadata.
    """

    def __init__(self, wrong_from: int = 10**9) -> None:
        self.fault: Callable[[], object] | None = None  # called while a batch is written, halfway; it raises
        self.wrong_from = wrong_from  # graphs of at least this many tokens compute something else
        self.forwards: list[int] = []  # tokens of each forward pass

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(
            input_rows_per_token=2,
            input_shape=(),
            input_dtype=torch.float32,
            metadata={"length": MetadataSpec((), torch.int64), "factor": MetadataSpec((1,), torch.float32)},
            output_shape=(1,),
            output_token_axis=0,
            output_dtype=torch.float32,
            max_relative_error=1e-5,
        )

    def get_encoder_cudagraph_budget_range(self) -> tuple[int, int]:
        return 2, 20

    def get_encoder_cudagraph_num_items(self, batch: list[list[float]]) -> int:
        return len(batch)

    def get_encoder_cudagraph_per_item_output_tokens(self, batch: list[list[float]]) -> list[int]:
        return [len(image) // 2 for image in batch]

    def get_encoder_cudagraph_per_item_input_sizes(self, batch: list[list[float]]) -> list[int]:
        return [len(image) for image in batch]

    def select_encoder_cudagraph_items(
        self, batch: list[list[float]], indices: Sequence[int]
    ) -> list[list[float]]:
        return [batch[index] for index in indices]

    def prepare_encoder_cudagraph_capture_inputs(
        self, token_budget: int, max_batch_size: int
    ) -> list[list[float]]:
        rng = np.random.default_rng(token_budget)
        rest = token_budget // max_batch_size
        lengths = [token_budget - rest * (max_batch_size - 1), *[rest] * (max_batch_size - 1)]
        return [rng.normal(size=2 * tokens).tolist() for tokens in lengths]

    def prepare_encoder_cudagraph_replay_buffers(
        self, batch: list[list[float]], buffers: ReplayBuffers
    ) -> None:
        if self.fault is not None:
            buffers.input[:] = torch.nan
            for array in buffers.metadata.values():
                array.fill_(3)
            self.fault()
        buffers.input[:] = torch.tensor([x for image in batch for x in image])
        for slot, image in enumerate(batch):
            buffers.metadata["length"][slot] = len(image) // 2
            buffers.metadata["factor"][slot] = factor(image)

    def encoder_cudagraph_forward(
        self, inputs: torch.Tensor, metadata: Mapping[str, torch.Tensor], output: torch.Tensor
    ) -> None:
        self.forwards.append(len(output))
        at = 0
        for length, times in zip(metadata["length"].tolist(), metadata["factor"].flatten(), strict=True):
            pairs = inputs[2 * at : 2 * (at + length)].view(-1, 2).sum(1)
            output[at : at + length, 0] = pairs.cumsum(0) * times
            at += length
        if len(output) >= self.wrong_from:
            output += 1

    def encoder_eager_forward(self, batch: list[list[float]]) -> torch.Tensor:
        return torch.cat([expected(image) for image in batch])


def factor(image: list[float]) -> float:
    return 1 + abs(image[0])


def expected(image: list[float]) -> torch.Tensor:
    return (torch.tensor(image).view(-1, 2).sum(1).cumsum(0) * factor(image))[:, None]


def images(*num_tokens: int, seed: int = 0) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=2 * tokens).tolist() for tokens in num_tokens]


def manager(model: SumEncoder | None = None, **settings: Any) -> EncoderCudaGraphManager[list[list[float]]]:
    return EncoderCudaGraphManager(model or SumEncoder(), CudaGraphSettings(**settings), CPU)


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


def test_graph_that_differs_from_an_eager_run_stops_the_start() -> None:
    with pytest.raises(ModelError, match=r"graph of 8 tokens differs from an eager run by .*turn cudagraph"):
        manager(SumEncoder(wrong_from=8), token_budgets=(4, 8))


def test_graph_that_is_not_finite_stops_the_start() -> None:
    class Nan(SumEncoder):
        def encoder_cudagraph_forward(
            self, inputs: torch.Tensor, metadata: Mapping[str, torch.Tensor], output: torch.Tensor
        ) -> None:
            output.fill_(torch.nan)

    with pytest.raises(ModelError, match="graph of 4 tokens differs from an eager run by nan"):
        manager(Nan(), token_budgets=(4,))


class Limited(SumEncoder):
    """Has memory for a limited number of tokens."""

    def __init__(self, limit: int, eager_limit: int = 10**9) -> None:
        super().__init__()
        self.limit, self.eager_limit = limit, eager_limit
        self.eager_runs: list[int] = []

    def encoder_cudagraph_forward(
        self, inputs: torch.Tensor, metadata: Mapping[str, torch.Tensor], output: torch.Tensor
    ) -> None:
        if len(output) > self.limit:
            raise torch.OutOfMemoryError("no memory")
        super().encoder_cudagraph_forward(inputs, metadata, output)

    def encoder_eager_forward(self, batch: list[list[float]]) -> torch.Tensor:
        self.eager_runs.append(sum(map(len, batch)) // 2)
        if self.eager_runs[-1] > self.eager_limit:
            raise torch.OutOfMemoryError("no memory")
        return super().encoder_eager_forward(batch)


@pytest.mark.parametrize(
    ("limit", "advice"),
    [(19, "budgets up to 16 tokens fit"), (9, "up to 8 tokens fit"), (1, "not even the smallest fits")],
)
def test_start_without_enough_memory_says_which_budgets_fit(limit: int, advice: str) -> None:
    with pytest.raises(ModelError, match=f"no memory for a graph of 20 tokens; .*{advice}") as error:
        manager(Limited(limit), budget_steps=1)
    assert "\n" not in str(error.value)


def test_memory_may_also_be_short_in_the_test_after_capture() -> None:
    with pytest.raises(ModelError, match="no memory for a graph of 20 tokens; budgets up to 16 tokens fit"):
        manager(Limited(20, eager_limit=19), budget_steps=1)


class Tracked(Limited):
    """Records whether the output buffers of earlier attempts exist when a smaller budget is tried."""

    def __init__(self, limit: int, eager_limit: int = 10**9) -> None:
        super().__init__(limit, eager_limit)
        self.outputs: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []

    def encoder_cudagraph_forward(
        self, inputs: torch.Tensor, metadata: Mapping[str, torch.Tensor], output: torch.Tensor
    ) -> None:
        self.alive.append(sum(tensor() is not None for tensor in self.outputs))
        self.outputs.append(weakref.ref(output))
        super().encoder_cudagraph_forward(inputs, metadata, output)


@pytest.mark.parametrize(
    ("limits", "alive"),
    [
        ((19, 10**9), [0, 0]),  # memory is short in the first capture, and 16 tokens fit
        # Memory is short in the first test, when all 5 budgets are captured. The replay is the sixth forward
        # pass.
        ((20, 19), [0, 1, 2, 3, 4, 0]),
    ],
)
def test_memory_of_a_failed_start_is_free_when_smaller_budgets_are_tried(
    limits: tuple[int, int], alive: list[int], no_collection: None
) -> None:
    model = Tracked(*limits)
    with pytest.raises(ModelError, match="budgets up to 16 tokens fit"):
        manager(model, budget_steps=1)
    assert model.alive == alive


def test_warm_up_ends_where_memory_is_short(caplog: pytest.LogCaptureFixture) -> None:
    encoder = Limited(20, eager_limit=9)
    warm_up(encoder, (2, 5, 8, 12, 16))
    assert encoder.eager_runs == [2, 5, 8, 12]
    assert [record.getMessage() for record in caplog.records] == [
        "no memory to run an image of 12 tokens eagerly: such requests will fail"
    ]


def test_graph_that_is_wrong_only_with_padding_stops_the_start() -> None:
    class Leaky(SumEncoder):
        def encoder_cudagraph_forward(
            self, inputs: torch.Tensor, metadata: Mapping[str, torch.Tensor], output: torch.Tensor
        ) -> None:
            super().encoder_cudagraph_forward(inputs, metadata, output)
            if metadata["length"].sum() < len(output):
                output.fill_(torch.nan)

    with pytest.raises(ModelError, match="graph of 8 tokens differs from an eager run by nan"):
        manager(Leaky(), token_budgets=(8,))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"token_budgets": (1, 4)}, "token budget 1 is under the model's smallest image, 2 tokens"),
        ({"token_budgets": (4, 4)}, "list a budget twice"),
        ({"budget_steps": 0}, "steps per octave must be 1 or more"),
        ({"token_budgets": (4,), "max_images_per_batch": 5}, "must be 1 to the smallest budget, 4, not 5"),
        ({"token_budgets": (8,), "max_images_per_batch": 5}, "5 images per batch never fit"),
    ],
)
def test_contradicting_settings_are_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        manager(**settings)


def test_capture_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "models.cudagraph_capture"):
        graphs = manager(token_budgets=(4, 8))
    assert "captured 8 tokens in" in caplog.text
    assert "captured 2 budgets of 4 to 8 tokens" in caplog.text
    assert graphs.capture_seconds > 0


SIZES = [(256, 256), (320, 320), (640, 480), (1000, 100), (256, 288), (900, 700)]


@pytest.fixture(scope="module")
def eager() -> VisionEncoder:
    return VisionEncoder.from_pretrained("demo", device="cpu")


@pytest.fixture(scope="module")
def replayed() -> VisionEncoder:
    settings = CudaGraphSettings(token_budgets=(96, 200, 512), max_images_per_batch=3)
    return VisionEncoder.from_pretrained("demo", device="cpu", cuda_graphs=settings)


def patches(encoder: VisionEncoder) -> list[Patches]:
    rng = np.random.default_rng(1)
    return [encoder.preprocess(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in SIZES]


def test_vision_transformer_implements_the_protocol(replayed: VisionEncoder) -> None:
    assert isinstance(replayed.graphs.model, SupportsEncoderCudaGraph)
    assert replayed.graphs.model.get_encoder_cudagraph_budget_range() == (64, 1024)
    assert [x.max_batch_size for x in replayed.graphs.graphs.values()] == [3, 3, 1]


def test_vision_transformer_gives_the_same_tokens_by_replay(
    eager: VisionEncoder, replayed: VisionEncoder
) -> None:
    batch = patches(eager)
    for one, other in zip(eager.encode(batch), replayed.encode(batch), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("places", [[0], [3, 0, 2], [5, 4, 3, 2, 1, 0]])
def test_pixels_of_images_are_written_one_after_the_other(replayed: VisionEncoder, places: list[int]) -> None:
    batch = [patches(replayed)[place] for place in places]
    expected = torch.cat([image.pixels for image in batch])
    rows, grids = torch.full_like(expected, 7), torch.zeros(8, 2, dtype=torch.int32)
    replayed.graphs.model.prepare_encoder_cudagraph_replay_buffers(
        batch, ReplayBuffers(rows, {"grids": grids})
    )
    assert torch.equal(rows, expected)
    unused = [[0, 0]] * (8 - len(batch))
    assert grids.tolist() == [[*image.grid_thw[1:]] for image in batch] + unused


def test_nan_does_not_survive_its_batch(replayed: VisionEncoder) -> None:
    small = patches(replayed)[0]
    before = replayed.encode([small])[0]
    bias = replayed.model.patch_embed.proj.bias
    saved = bias.clone()
    with torch.inference_mode():
        bias.fill_(torch.nan)
        assert replayed.encode([small, patches(replayed)[2]])[1].isnan().all()
        bias.copy_(saved)
    assert torch.equal(replayed.encode([small])[0], before)


def test_replay_gives_pooled_vectors_and_counts(eager: VisionEncoder, replayed: VisionEncoder) -> None:
    outputs = [
        OutputSpec(pooled=True, normalize=True, deepstack=False),
        OutputSpec(),
        OutputSpec(deepstack=False),
    ]
    items = [EncodeItem(image, outputs[i % 3]) for i, image in enumerate(patches(eager))]
    ours, theirs = replayed.run(items), eager.run(items)
    for one, other in zip(ours.embeddings, theirs.embeddings, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    (stats,) = ours.stats
    assert (stats.hits, dict(stats.misses)) == (5, {"oversize": 1})
    assert stats.padding_tokens == sum(budget * n for budget, n in stats.replays.items()) - (
        stats.num_tokens - items[-1].patches.num_tokens
    )

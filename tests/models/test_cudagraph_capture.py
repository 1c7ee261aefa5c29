"""Capture at start: wrong graphs, too little memory, settings."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from models import (
    ModelError,
)
from models.warm_up import warm_up
from tests.support.sum_encoder import SumEncoder, manager


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

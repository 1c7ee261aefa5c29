"""Errors and encoders as messages for another process."""

from __future__ import annotations

import errno
import pickle
from typing import Any, cast

import pytest
import torch

from models import DeviceError, ModelError, OutputSpec, VisionEncoder
from service.processes.wire.messages import EncoderFacts, Fault
from tests.support.app import FakeEncoder, FakeGraphs
from tests.support.queueing import item


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """With a trace, as what was raised has."""
    try:
        if cause is None:
            raise error
        raise error from cause
    except BaseException as caught:
        return caught


def there(error: BaseException) -> Exception:
    """The error as the other process has it."""
    fault: Fault = pickle.loads(pickle.dumps(Fault.of(error)))
    return fault.error()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("not a number"), "not a number"),
        (torch.OutOfMemoryError("out of memory"), "out of memory"),
        (KeyError(), "KeyError()"),
        (SystemExit(), "SystemExit()"),
    ],
)
def test_error_keeps_its_message_and_its_trace(error: BaseException, message: str) -> None:
    found = there(raised(error))
    assert type(found) is RuntimeError
    assert str(found) == message
    [trace] = found.__notes__
    assert "in raised" in trace
    assert type(error).__name__ in trace


def test_error_of_the_system_keeps_its_number() -> None:
    found = there(raised(OSError(errno.ENOSPC, "No space left on device")))
    assert isinstance(found, OSError)
    assert found.errno == errno.ENOSPC
    assert "No space left on device" in str(found)


def test_loss_of_a_device_keeps_its_message_and_the_trace_of_its_cause() -> None:
    cause = raised(torch.AcceleratorError("illegal memory access"))
    error = raised(DeviceError("cuda:1", cause), cause)
    found = there(error)
    assert isinstance(found, DeviceError)
    assert (found.device, str(found)) == ("cuda:1", str(error))
    assert found.__cause__ is not None
    assert "AcceleratorError" in found.__cause__.__notes__[0]
    again = there(found)
    assert (type(again), str(again)) == (DeviceError, str(error))


def test_error_of_the_model_is_the_same_line() -> None:
    found = there(raised(ModelError("no such weights")))
    assert (type(found), str(found)) == (ModelError, "no such weights")
    assert not hasattr(found, "__notes__")


def test_only_the_loss_of_a_device_becomes_a_device_error() -> None:
    lost = Fault.of(DeviceError("cpu", ValueError("gone")))
    assert lost.device_error().device == "cpu"
    with pytest.raises(AssertionError, match="no fault of a device"):
        Fault.of(ValueError("other")).device_error()


def test_facts_have_all_that_is_read_of_an_encoder() -> None:
    graphs = FakeGraphs({128: None, 64: None}, max_images=9, memory_bytes=7, capture_seconds=0.5)
    encoder = cast(Any, FakeEncoder(graphs=graphs))
    facts: EncoderFacts = pickle.loads(pickle.dumps(EncoderFacts.of(encoder)))
    for name in ("revision", "fingerprint", "dtype", "attn_backend", "hidden_size", "width", "num_deepstack"):
        assert getattr(facts, name) == getattr(encoder, name)
    assert (facts.graphs.graphs, facts.graphs.max_images) == ((64, 128), 9)
    assert (facts.graphs.memory_bytes, facts.graphs.capture_seconds) == (7, 0.5)
    assert facts.preprocessor.config == encoder.preprocessor.config


def test_facts_of_a_real_encoder_prepare_images_like_it() -> None:
    encoder = VisionEncoder.from_pretrained("demo", device="cpu", dtype=torch.float32)
    facts: EncoderFacts = pickle.loads(pickle.dumps(EncoderFacts.of(encoder)))
    pixels = torch.randint(0, 256, (70, 90, 3), dtype=torch.uint8).numpy()
    ours, theirs = encoder.preprocess(pixels), facts.preprocessor(pixels)
    assert ours.grid_thw == theirs.grid_thw
    assert ours.pixels.equal(theirs.pixels)
    assert facts.preprocessor.config == encoder.preprocessor.config


def test_image_is_the_same_after_sending() -> None:
    output = OutputSpec(pooled=False, deepstack=True, dtype=torch.bfloat16)
    assert pickle.loads(pickle.dumps(item(1, 1, output).output)) == output

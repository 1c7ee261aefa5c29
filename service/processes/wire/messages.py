"""What the processes tell each other."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from prometheus_client import Metric

from models import BatchStats, DeviceError, ModelError, OutputSpec, Preprocessor, VisionEncoder
from service.config.settings import Settings

# What a process is told to stop with from outside. What they mean for the others is the supervisor's concern.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

# About batches, between an API server and one device


@dataclass(frozen=True)
class Wanting:
    """From an API server: images wait."""


@dataclass(frozen=True)
class Granted:
    """To an API server: the device has a place. Its batch, or `Nothing`, is the answer."""

    num_idle_others: int  # devices that have nothing to do


@dataclass(frozen=True)
class Nothing:
    """From an API server: what waited does not wait any more."""


@dataclass(frozen=True)
class BatchImage:
    """One image of a batch."""

    grid_thw: tuple[int, int, int]
    num_tokens: int
    output: OutputSpec


@dataclass(frozen=True)
class BatchMessage:
    """From an API server. The patches [all images' rows, patch_dim] stand in the memory of the two."""

    number: int
    images: tuple[BatchImage, ...]
    patch_dim: int


@dataclass(frozen=True)
class Place:
    """Where a tensor stands in the files of a message."""

    file: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Result:
    """To an API server: a batch is done. The embeddings are in the message's files."""

    number: int
    file_sizes: tuple[int, ...]
    embeddings: tuple[Place, ...]
    stats: tuple[BatchStats, ...]
    started_at: float
    finished_at: float


@dataclass(frozen=True)
class Fault:
    """An error of another process: what it was, in words, and its trace."""

    device: str | None  # that is lost by it
    is_model_error: bool
    message: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        device = error.device if isinstance(error, DeviceError) else None
        cause = error if device is None else error.__cause__ or error
        return cls(
            device=device,
            is_model_error=isinstance(error, ModelError),
            message=str(cause) or repr(cause),
            trace="".join(traceback.format_exception(cause)),
        )

    def error(self) -> Exception:
        """The same in this process."""
        if self.is_model_error:
            return ModelError(self.message)
        error = RuntimeError(self.message)
        error.add_note(self.trace)
        return error if self.device is None else DeviceError(self.device, error)

    def device_error(self) -> DeviceError:
        """The same, as the loss of a device."""
        error = self.error()
        assert isinstance(error, DeviceError), f"no fault of a device: {self.message}"
        return error


@dataclass(frozen=True)
class Failure:
    """To an API server: a batch failed."""

    number: int
    fault: Fault


# About the server, between the supervisor and the other processes


@dataclass(frozen=True)
class Setup:
    """To an API server, first of all. Files: listener, tallies; of each device, batches and results."""

    settings: Settings
    index: int
    num_servers: int
    devices: tuple[str, ...]
    started_at: int  # seconds since 1970


@dataclass(frozen=True)
class DeviceSetup:
    """To a device's process, first of all. Files: idleness; of each API server, batches and results."""

    settings: Settings
    device: str
    index: int
    num_devices: int


@dataclass(frozen=True)
class GraphFacts:
    """What is said of an encoder's CUDA graphs."""

    graphs: tuple[int, ...]  # budgets
    max_images: int
    memory_bytes: int
    capture_seconds: float


@dataclass(frozen=True)
class EncoderFacts:
    """What an API server has to know of an encoder that another process has. The names are the encoder's."""

    revision: str | None
    fingerprint: str
    dtype: torch.dtype
    attn_backend: str
    hidden_size: int
    width: int
    num_deepstack: int
    preprocessor: Preprocessor
    graphs: GraphFacts

    @classmethod
    def of(cls, encoder: VisionEncoder) -> EncoderFacts:
        graphs = encoder.graphs
        return cls(
            encoder.revision,
            encoder.fingerprint,
            encoder.dtype,
            encoder.attn_backend,
            encoder.hidden_size,
            encoder.width,
            encoder.num_deepstack,
            encoder.preprocessor,
            GraphFacts(
                tuple(sorted(graphs.graphs)), graphs.max_images, graphs.memory_bytes, graphs.capture_seconds
            ),
        )


@dataclass(frozen=True)
class Up:
    """From an API server: it can take what comes next."""


@dataclass(frozen=True)
class DeviceLoaded:
    """From a device's process: it has its model, or could not load it.

    Files: for each API server, memory for the patches of a batch.
    """

    encoder: EncoderFacts | Fault
    memory_bytes: int = 0


@dataclass(frozen=True)
class Loaded:
    """To an API server: what each device has said. Files: of each that has its model, the memory."""

    devices: Mapping[str, DeviceLoaded]


@dataclass(frozen=True)
class Lost:
    """From a device's process, and to the API servers: a device failed."""

    device: str
    fault: Fault


@dataclass(frozen=True)
class Stop:
    """To an API server: leave, drain and end."""


@dataclass(frozen=True)
class Farewell:
    """From an API server, the last of all: its metrics."""

    metrics: Sequence[Metric]


@dataclass(frozen=True)
class Ping:
    """From the supervisor, to be answered on the event loop with `Pong`."""


@dataclass(frozen=True)
class Pong:
    """To the supervisor."""


@dataclass(frozen=True)
class Gather:
    """From an API server that asks for the metrics of all processes. The number is that of its call."""

    number: int


@dataclass(frozen=True)
class Gathered:
    """To an API server: the answer to calls of it. `metrics` is None if a process did not answer."""

    numbers: tuple[int, ...]
    metrics: Sequence[Metric] | None


@dataclass(frozen=True)
class Scrape:
    """From the supervisor: asks a process for its own metrics."""


@dataclass(frozen=True)
class Scraped:
    """To the supervisor: the metrics of the process. `metrics` is None if it could not send them."""

    metrics: Sequence[Metric] | None

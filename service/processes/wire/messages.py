"""The messages between the processes."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from prometheus_client import Metric

from models import BatchStats, DeviceError, ModelError, OutputSpec, Preprocessor, TokenSink, VisionEncoder
from service.config.settings import Settings

# Signals that stop the server. The supervisor handles them, and tells the other processes.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

# Between an API server and the process of a device


@dataclass(frozen=True)
class Wanting:
    """From an API server: images wait."""


@dataclass(frozen=True)
class Granted:
    """To an API server: the device has a place for a batch. The answer is a batch or `Nothing`."""

    num_idle_others: int  # other devices that are idle


@dataclass(frozen=True)
class Nothing:
    """From an API server: no images wait any more."""


@dataclass(frozen=True)
class BatchImage:
    """One image of a batch."""

    grid_thw: tuple[int, int, int]
    num_tokens: int
    output: OutputSpec
    sink: TokenSink | None = None


@dataclass(frozen=True)
class BatchMessage:
    """From an API server. The patches [rows of all images, patch_dim] are in the memory that both share."""

    number: int
    images: tuple[BatchImage, ...]
    patch_dim: int


@dataclass(frozen=True)
class Place:
    """Where a tensor is in the files of a message."""

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
    """An error of another process: its message and its trace."""

    device: str | None  # the device that is lost, if one is
    is_model_error: bool
    message: str
    trace: str
    number: int | None = None  # the number of the system's error, if it is one

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        device = error.device if isinstance(error, DeviceError) else None
        cause = error if device is None else error.__cause__ or error
        return cls(
            device=device,
            is_model_error=isinstance(error, ModelError),
            message=str(cause) or repr(cause),
            trace="".join(traceback.format_exception(cause)),
            number=cause.errno if isinstance(cause, OSError) else None,
        )

    def error(self) -> Exception:
        """Returns the error for this process."""
        if self.is_model_error:
            return ModelError(self.message)
        error = RuntimeError(self.message) if self.number is None else OSError(self.number, self.message)
        error.add_note(self.trace)
        return error if self.device is None else DeviceError(self.device, error)

    def device_error(self) -> DeviceError:
        """Returns the error, which is the loss of a device."""
        error = self.error()
        assert isinstance(error, DeviceError), f"no fault of a device: {self.message}"
        return error


@dataclass(frozen=True)
class Failure:
    """To an API server: a batch failed."""

    number: int
    fault: Fault


# Between the supervisor and the other processes


@dataclass(frozen=True)
class Setup:
    """The first message to an API server. Files: listener, tallies, and two links to each device."""

    settings: Settings
    index: int
    num_servers: int
    devices: tuple[str, ...]
    started_at: int  # seconds since 1970


@dataclass(frozen=True)
class DeviceSetup:
    """The first message to the process of a device. Files: idleness, and two links to each API server."""

    settings: Settings
    device: str
    index: int
    num_devices: int


@dataclass(frozen=True)
class GraphFacts:
    """The facts of the CUDA graphs of an encoder."""

    graphs: tuple[int, ...]  # budgets
    max_images: int
    memory_bytes: int
    capture_seconds: float


@dataclass(frozen=True)
class EncoderFacts:
    """The facts that an API server needs of an encoder of another process. Names as in `VisionEncoder`."""

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
    """From an API server: it has started and reads messages."""


@dataclass(frozen=True)
class DeviceLoaded:
    """From the process of a device: the model is loaded, or could not be loaded.

    Files: memory for the patches of a batch, for each API server.
    """

    encoder: EncoderFacts | Fault
    memory_bytes: int = 0


@dataclass(frozen=True)
class Loaded:
    """To an API server: the messages of all devices. Files: the memory of each device that has its model."""

    devices: Mapping[str, DeviceLoaded]


@dataclass(frozen=True)
class Lost:
    """From the process of a device, and to the API servers: a device failed."""

    device: str
    fault: Fault


@dataclass(frozen=True)
class Stop:
    """To an API server: drain and exit."""


@dataclass(frozen=True)
class Farewell:
    """The last message of an API server: its metrics."""

    metrics: Sequence[Metric]


@dataclass(frozen=True)
class Ping:
    """From the supervisor. The process answers `Pong` from its event loop."""


@dataclass(frozen=True)
class Pong:
    """To the supervisor: the answer to `Ping`."""


@dataclass(frozen=True)
class Gather:
    """From an API server that asks for the metrics of all processes. `number` names its call."""

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

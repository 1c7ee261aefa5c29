"""The encoder and what goes around it. Knows tensors and nothing of requests."""

from models.cudagraph import CudaGraphSettings, EncoderCudaGraphManager
from models.devices import replica_devices
from models.encoder import VisionEncoder
from models.errors import DeviceError, ModelError
from models.outputs import BatchResult, BatchStats, EncodeItem, OutputSpec
from models.preprocess import AspectRatioError, Patches, PreprocessConfig, Preprocessor
from models.replica import Replica, ReplicaGroup

__all__ = [
    "AspectRatioError",
    "BatchResult",
    "BatchStats",
    "CudaGraphSettings",
    "DeviceError",
    "EncodeItem",
    "EncoderCudaGraphManager",
    "ModelError",
    "OutputSpec",
    "Patches",
    "PreprocessConfig",
    "Preprocessor",
    "Replica",
    "ReplicaGroup",
    "VisionEncoder",
    "replica_devices",
]

"""The vision encoder: checkpoints, preprocessing, CUDA graphs, replicas. Knows nothing of requests."""

from models.config import VisionConfig
from models.cudagraph import CudaGraphSettings, EncoderCudaGraphManager
from models.cudagraph_budget import BudgetGraphMetadata
from models.cudagraph_protocol import SupportsEncoderCudaGraph
from models.demo import RANDOM_SIZES, random_checkpoint
from models.devices import find_device, replica_devices
from models.encoder import VisionEncoder
from models.errors import DeviceError, ModelError
from models.outputs import BatchResult, BatchStats, EncodeItem, OutputSpec
from models.preprocess import MAX_ASPECT_RATIO, AspectRatioError, Patches, PreprocessConfig, Preprocessor
from models.replica import Replica
from models.replica_group import ReplicaGroup
from models.token_sinks import TokenSink, TokenWriting, write_tokens
from models.weights import Checkpoint, open_checkpoint

__all__ = [
    "MAX_ASPECT_RATIO",
    "RANDOM_SIZES",
    "AspectRatioError",
    "BatchResult",
    "BatchStats",
    "BudgetGraphMetadata",
    "Checkpoint",
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
    "SupportsEncoderCudaGraph",
    "TokenSink",
    "TokenWriting",
    "VisionConfig",
    "VisionEncoder",
    "find_device",
    "open_checkpoint",
    "random_checkpoint",
    "replica_devices",
    "write_tokens",
]

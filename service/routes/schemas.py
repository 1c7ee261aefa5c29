"""The shapes of JSON answers, for `/openapi.json` and for answers that are small.

Answers with embeddings are written from arrays instead. Tests validate them against these models.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from service.errors import ErrorCode


class Shape(BaseModel):
    """A JSON object with exactly these members."""

    model_config = ConfigDict(extra="forbid")


class EmbeddingItem(Shape):
    object: Literal["embedding"]
    index: int = Field(description="position of the image in the request")
    embedding: list[float] | list[list[float]] | str = Field(
        description="one vector with `pooling=mean`, a vector for each token with `pooling=none`; "
        "with `encoding_format=base64` the little-endian bytes of that array"
    )
    shape: list[int] | None = Field(None, description="of the array, with `encoding_format=base64` only")
    num_tokens: int
    grid_thw: tuple[int, int, int] = Field(description="grid in patches, before the spatial merge")
    width: int = Field(description="in pixels, of the image as seen, after its EXIF orientation")
    height: int
    sha256: str = Field(description="of the bytes sent, in hex")


class EmbedUsage(Shape):
    num_images: int
    num_tokens: int


class EmbedResponse(Shape):
    object: Literal["list"]
    model: str
    revision: str | None
    fingerprint: str = Field(description="only vectors with the same fingerprint may be compared")
    dtype: Literal["float32", "float16", "bfloat16"]
    data: list[EmbeddingItem]
    usage: EmbedUsage


class ImageEmbeds(Shape):
    image_embeds: str = Field(
        description="base64 of a file with the tokens [num_tokens, token_width]: of `torch.save` for "
        "bfloat16, else `.npy`"
    )
    image_grid_thw: tuple[int, int, int] = Field(description="grid in patches, before the spatial merge")


class ContentPart(Shape):
    type: Literal["image_embeds"]
    uuid: str = Field(
        pattern="^vs1-[0-9a-f]{64}$",
        description="key of the image in vLLM's caches: a hash over `fingerprint`, the image's SHA-256 and "
        "`dtype`",
    )
    image_embeds: ImageEmbeds


class VllmResponse(Shape):
    model: str
    revision: str | None
    fingerprint: str
    dtype: Literal["float32", "float16", "bfloat16"]
    token_width: int = Field(description="number of columns of a token, deepstack columns included")
    content: list[ContentPart] = Field(description="one for each image, to be put into a chat message")


class HandoffItem(Shape):
    uuid: str = Field(pattern="^vs1-[0-9a-f]{64}$", description="name of the tokens, as with `format=vllm`")
    grid_thw: tuple[int, int, int] = Field(description="grid in patches, before the spatial merge")
    num_tokens: int
    width: int = Field(description="number of columns of a token, deepstack columns included")
    dtype: Literal["float32", "float16", "bfloat16"]
    bytes: int = Field(description="size of the safetensors file")


class HandoffResponse(Shape):
    object: Literal["list"]
    model: str
    revision: str | None
    fingerprint: str
    dtype: Literal["float32", "float16", "bfloat16"]
    data: list[HandoffItem] = Field(description="one for each image, in order")
    usage: EmbedUsage


class OpenAIEmbedding(Shape):
    object: Literal["embedding"]
    index: int = Field(description="position of the image in the request")
    embedding: list[float] | str = Field(
        description="with `encoding_format=base64` the little-endian float32 bytes"
    )


class OpenAIUsage(Shape):
    prompt_tokens: int = Field(description="image tokens")
    total_tokens: int


class OpenAIResponse(Shape):
    object: Literal["list"]
    data: list[OpenAIEmbedding]
    model: str
    usage: OpenAIUsage


class ErrorDetail(Shape):
    message: str
    type: str
    param: str | None = Field(description="the cause, such as `images[3]` or an option")
    code: ErrorCode


class ErrorResponse(Shape):
    error: ErrorDetail


class Status(Shape):
    status: Literal["ok"] = "ok"


class Limits(Shape):
    max_body_bytes: int
    max_image_bytes: int
    max_image_pixels: int
    max_images_per_request: int
    max_request_tokens: int


class CudaGraphs(Shape):
    enabled: bool
    token_budgets: tuple[int, ...] = Field(description="sizes of the captured graphs, in image tokens")
    max_images_per_batch: int = Field(description="maximum number of images in one replay; 0 without graphs")


class Preprocessing(Shape):
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Info(Shape):
    model: str
    demo: bool = Field(description="true: the weights are random, so the vectors mean nothing")
    revision: str | None
    fingerprint: str
    dtype: str
    devices: tuple[str, ...] = Field(description="names of the replicas, as in the metrics")
    attn_backend: str
    encoder_cudagraph: CudaGraphs
    hidden_size: int = Field(description="length of a pooled vector; number of main columns of a token")
    width: int = Field(description="number of columns of a token, deepstack columns included")
    num_deepstack: int = Field(description="deepstack levels, each of `hidden_size` columns")
    limits: Limits
    preprocessing: Preprocessing
    version: str


class ModelCard(Shape):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["vision-sidecar"] = "vision-sidecar"


class ModelList(Shape):
    object: Literal["list"] = "list"
    data: list[ModelCard]

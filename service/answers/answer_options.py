"""The options of a request, resolved: every default is filled in, and no two options conflict.

Knows what the options mean to the encoder and to the size of an answer; knows nothing of how a request
states them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from models import OutputSpec
from service.answers.dtypes import TORCH_DTYPES, DtypeName
from service.errors import BadRequest

Pooling = Literal["mean", "none"]
EncodingFormat = Literal["float", "base64"]
EmbedFormat = Literal["json", "safetensors", "npy", "vllm", "handoff"]
AnswerFormat = EmbedFormat | Literal["openai"]  # "openai" is for `/v1/embeddings` only
# Writing and reading JSON of more numbers takes longer than any encoder, and it has more than about 50 MB.
MAX_JSON_FLOATS = 4_194_304


@dataclass(frozen=True)
class AnswerOptions:
    """The options of one request, with every default resolved."""

    pooling: Pooling
    normalize: bool
    deepstack: bool
    dtype: DtypeName | None  # None: the model's own
    encoding_format: EncodingFormat | None  # None: `format` leaves no choice
    format: AnswerFormat

    def output_spec(self) -> OutputSpec:
        """The part of the options that the encoder needs."""
        return OutputSpec(
            pooled=self.pooling == "mean",
            normalize=self.normalize,
            deepstack=self.deepstack,
            dtype=None if self.dtype is None else TORCH_DTYPES[self.dtype],
        )

    def check_size(self, *, num_images: int, num_tokens: int, hidden_size: int, width: int) -> None:
        """Refuses a request whose answer cannot be written, before anything is encoded.

        `num_tokens` is the sum over the images, `width` the columns of a token with its deepstack columns.
        Raises `BadRequest`: `response_too_large` for more than `MAX_JSON_FLOATS` JSON floats, and
        `option_conflict` for the tokens of several images in one npy file.
        """
        if self.format == "npy" and self.pooling == "none" and num_images > 1:
            raise option_conflict(
                "format",
                "an npy file cannot hold the tokens of several images, because nothing in it would say where "
                "an image ends; ask for format=safetensors, or send one image",
            )
        if self.encoding_format != "float":
            return
        rows = num_images if self.pooling == "mean" else num_tokens
        num_floats = rows * (width if self.deepstack else hidden_size)
        if num_floats > MAX_JSON_FLOATS:
            raise BadRequest(
                f"the answer would hold {num_floats} JSON floats; {MAX_JSON_FLOATS} are allowed. Ask for "
                "encoding_format=base64 or, at /embed, for format=safetensors, or send fewer images",
                code="response_too_large",
                param="encoding_format",
            )


def option_conflict(name: str, message: str) -> BadRequest:
    """The error for an option that cannot apply together with the others."""
    return BadRequest(message, code="option_conflict", param=name)

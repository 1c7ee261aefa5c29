"""What an answer is to hold and in which form, with every default filled in.

Knows what the options mean to the encoder and to the size of an answer; nothing of how a request
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
EmbedFormat = Literal["json", "safetensors", "npy", "vllm"]
AnswerFormat = EmbedFormat | Literal["openai"]  # the last is `/v1/embeddings`' own
# JSON of more numbers than this is slower to write and to read than any encoder, and some 50 MB large.
MAX_JSON_FLOATS = 4_194_304


@dataclass(frozen=True)
class AnswerOptions:
    """The options of one request, with every default resolved."""

    pooling: Pooling
    normalize: bool
    deepstack: bool
    dtype: DtypeName | None  # None: the model's own
    encoding_format: EncodingFormat | None  # None: no form in which there is a choice
    format: AnswerFormat

    def output_spec(self) -> OutputSpec:
        """The same, in the encoder's terms."""
        return OutputSpec(
            pooled=self.pooling == "mean",
            normalize=self.normalize,
            deepstack=self.deepstack,
            dtype=None if self.dtype is None else TORCH_DTYPES[self.dtype],
        )

    def check_size(self, *, num_images: int, num_tokens: int, hidden_size: int, width: int) -> None:
        """Refuses what cannot be answered, before anything is encoded.

        That is more JSON floats than may be sent, and tokens of several images in one npy file.
        `num_tokens` is the sum over the images, `width` the columns of a token with its deepstack columns.
        """
        if self.format == "npy" and self.pooling == "none" and num_images > 1:
            raise option_conflict(
                "format",
                "an npy file cannot say where the tokens of one image end; ask for format=safetensors, "
                "or send one image",
            )
        if self.encoding_format != "float":
            return
        rows = num_images if self.pooling == "mean" else num_tokens
        num_floats = rows * (width if self.deepstack else hidden_size)
        if num_floats > MAX_JSON_FLOATS:
            raise BadRequest(
                f"the response would hold {num_floats} JSON floats, and at most {MAX_JSON_FLOATS} are sent; "
                "ask for encoding_format=base64 or, at /embed, for format=safetensors; or send fewer images",
                code="response_too_large",
                param="encoding_format",
            )


def option_conflict(name: str, message: str) -> BadRequest:
    """An option cannot apply together with the others."""
    return BadRequest(message, code="option_conflict", param=name)

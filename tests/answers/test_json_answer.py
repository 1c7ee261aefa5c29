from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from service.answers.answer import ImageFacts, ModelIdentity
from service.answers.answer_options import AnswerOptions
from service.answers.serialize import serialize
from service.errors import NonFiniteOutput
from service.intake.options import resolve_options
from service.routes.schemas import EmbedResponse

MODEL = ModelIdentity(name="org/model", revision=None, fingerprint="f" * 64)
FACTS = ImageFacts(num_tokens=6, grid_thw=(1, 4, 6), width=96, height=64, sha256="0" * 64)
POOLED: dict[str, str | bool] = {}
TOKENS: dict[str, str | bool] = {"pooling": "none"}


def written(options: AnswerOptions, *embeddings: torch.Tensor, model: ModelIdentity = MODEL) -> bytes:
    return b"".join(serialize(model, options, [FACTS] * len(embeddings), embeddings).body)


def answer(sent: dict[str, str | bool], *embeddings: torch.Tensor) -> dict[str, Any]:
    body = written(resolve_options(sent, None), *embeddings)
    EmbedResponse.model_validate_json(body)
    decoded: dict[str, Any] = json.loads(body)
    return decoded


def test_json_answer_has_exactly_the_documented_members() -> None:
    assert answer(POOLED, torch.tensor([0.5, -1.0]), torch.tensor([0.25, 2.0])) == {
        "object": "list",
        "model": "org/model",
        "revision": None,
        "fingerprint": "f" * 64,
        "dtype": "float32",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": embedding,
                "num_tokens": 6,
                "grid_thw": [1, 4, 6],
                "width": 96,
                "height": 64,
                "sha256": "0" * 64,
            }
            for index, embedding in enumerate([[0.5, -1.0], [0.25, 2.0]])
        ],
        "usage": {"num_images": 2, "num_tokens": 12},
    }


def test_tokens_are_a_list_of_rows() -> None:
    tokens = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    assert answer(TOKENS, tokens)["data"][0]["embedding"] == tokens.tolist()
    assert answer(TOKENS, tokens[:1])["data"][0]["embedding"] == tokens[:1].tolist()


def test_non_contiguous_tensor_is_written_in_its_own_order() -> None:
    tokens = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    assert answer(TOKENS, tokens[:, :2])["data"][0]["embedding"] == tokens[:, :2].tolist()
    sent = {**TOKENS, "encoding_format": "base64"}
    entry = answer(sent, tokens[:, :2])["data"][0]
    assert np.frombuffer(base64.b64decode(entry["embedding"]), "<f4").tolist() == [0, 1, 4, 5, 8, 9]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
@hypothesis_settings(derandomize=True, deadline=None)
def test_floats_read_back_as_the_same_float32(values: list[float]) -> None:
    body = written(resolve_options(POOLED, None), torch.tensor(values))
    texts = json.loads(body, parse_float=str, parse_int=str)["data"][0]["embedding"]
    for text, value in zip(texts, values, strict=True):
        assert struct.pack("<f", float(text)) == struct.pack("<f", value)
        digits = text.lower().partition("e")[0].strip("-").replace(".", "").strip("0")
        shortest = np.format_float_scientific(np.float32(value), unique=True, trim="-")
        assert digits == shortest.partition("e")[0].strip("-").replace(".", "").strip("0")


@pytest.mark.parametrize(("dtype", "integer"), [("float32", "<u4"), ("float16", "<u2"), ("bfloat16", "<u2")])
@pytest.mark.parametrize("shape", [(5,), (3, 5)])
def test_base64_holds_little_endian_bytes_beside_their_shape(
    dtype: str, integer: str, shape: tuple[int, ...]
) -> None:
    pooling = "mean" if len(shape) == 1 else "none"
    torch_dtype = getattr(torch, dtype)
    embedding = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch_dtype)
    body = answer({"pooling": pooling, "dtype": dtype, "encoding_format": "base64"}, embedding)
    entry = body["data"][0]
    assert body["dtype"] == dtype
    assert entry["shape"] == list(shape)
    bits = np.frombuffer(base64.b64decode(entry["embedding"], validate=True), integer)
    signed = torch.int32 if dtype == "float32" else torch.int16
    restored = torch.from_numpy(bits.astype(np.int64)).to(signed).view(torch_dtype).reshape(shape)
    assert torch.equal(restored, embedding)


def test_base64_of_a_large_array_is_one_string() -> None:
    tokens = torch.arange(300_001, dtype=torch.float32).reshape(-1, 1)
    entry = answer({"pooling": "none", "encoding_format": "base64"}, tokens)["data"][0]
    assert base64.b64decode(entry["embedding"], validate=True) == tokens.numpy().tobytes()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_non_finite_number_is_never_sent(bad: float, dtype: str) -> None:
    good = torch.ones(4, dtype=getattr(torch, dtype))
    broken = good.clone()
    broken[2] = bad
    options = resolve_options({"dtype": dtype, "encoding_format": "base64"}, None)
    with pytest.raises(NonFiniteOutput) as caught:
        serialize(MODEL, options, [FACTS] * 2, [good, broken])
    assert (caught.value.code, caught.value.param) == ("non_finite_output", "images[1]")


def test_quotes_in_names_are_escaped() -> None:
    model = ModelIdentity(name='a"b\\', revision="r\n", fingerprint="")
    body = json.loads(written(resolve_options(POOLED, None), torch.ones(2), model=model))
    assert (body["model"], body["revision"]) == ('a"b\\', "r\n")

"""Answers other than `/embed` in JSON: safetensors, npy, content parts for vLLM, `/v1/embeddings`."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from service.answers.answer import Answer, ImageFacts, ModelIdentity, Piece, join_pieces
from service.answers.answer_options import AnswerOptions
from service.answers.arrays import Base64Writer
from service.answers.serialize import serialize
from service.errors import NonFiniteOutput
from service.intake.options import openai_options, resolve_options
from service.routes.schemas import OpenAIResponse, VllmResponse
from tests.support.answers import (
    file_tensor,
    from_json,
    from_npy,
    from_safetensors,
    from_vllm,
    safetensors_metadata,
)

MODEL = ModelIdentity(name="org/model", revision="abc", fingerprint="f" * 64)
# Images of 2 and 6 tokens.
IMAGES = (
    ImageFacts(num_tokens=2, grid_thw=(1, 2, 4), width=64, height=32, sha256="0" * 64),
    ImageFacts(num_tokens=6, grid_thw=(1, 4, 6), width=96, height=64, sha256="1" * 64),
)
DTYPES = ("float32", "float16", "bfloat16")


def numbers(*shape: int, dtype: str = "float32", seed: int = 0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(getattr(torch, dtype))


def tokens_of(dtype: str, width: int = 12) -> list[torch.Tensor]:
    """The tokens of both images, each in a storage of its own as the encoder returns them."""
    return [tokens.clone() for tokens in numbers(8, width, dtype=dtype).split([2, 6])]


def written(
    embeddings: Sequence[torch.Tensor], options: AnswerOptions, images: Sequence[ImageFacts] = IMAGES
) -> tuple[bytes, str]:
    answer = serialize(MODEL, options, images, embeddings)
    body = b"".join(answer.body)
    assert answer.num_bytes == len(body)
    return body, answer.media_type


def options(**sent: str | bool) -> AnswerOptions:
    return resolve_options(sent, None)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors_holds_pooled_vectors(dtype: str) -> None:
    vectors = [numbers(4, dtype=dtype, seed=n) for n in range(2)]
    body, media_type = written(vectors, options(format="safetensors", dtype=dtype))
    assert media_type == "application/x-safetensors"
    tensors = safetensors.torch.load(body)
    assert set(tensors) == {"embeddings", "grid_thw", "num_tokens"}
    assert same_bits(tensors["embeddings"], torch.stack(vectors))
    assert same_bits(tensors["grid_thw"], torch.tensor([[1, 2, 4], [1, 4, 6]]))
    assert same_bits(tensors["num_tokens"], torch.tensor([2, 6]))
    assert safetensors_metadata(body) == {
        "model": "org/model",
        "revision": "abc",
        "fingerprint": "f" * 64,
        "pooling": "mean",
        "deepstack": "false",
        "dtype": dtype,
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_images", [1, 2])
def test_safetensors_holds_the_tokens_of_all_images(dtype: str, num_images: int) -> None:
    tokens = tokens_of(dtype)[:num_images]
    asked = options(format="safetensors", dtype=dtype, pooling="none", deepstack=True)
    body, _ = written(tokens, asked, IMAGES[:num_images])
    assert safetensors.torch.load(body)["embeddings"].shape == (sum(map(len, tokens)), 12)
    for got, sent in zip(from_safetensors(body), tokens, strict=True):
        assert same_bits(got, sent)
    metadata = safetensors_metadata(body)
    assert (metadata["pooling"], metadata["deepstack"]) == ("none", "true")


def test_unknown_revision_is_empty_in_safetensors() -> None:
    model = replace(MODEL, revision=None)
    [body] = serialize(model, options(format="safetensors"), IMAGES[:1], [numbers(4)]).body
    assert safetensors_metadata(bytes(body))["revision"] == ""


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_npy_is_one_array(dtype: str) -> None:
    vectors = [numbers(4, dtype=dtype, seed=n) for n in range(2)]
    body, media_type = written(vectors, options(format="npy", dtype=dtype))
    assert media_type == "application/x-npy"
    assert same_bits(from_npy(body), torch.stack(vectors))
    body, _ = written(vectors[:1], options(format="npy", dtype=dtype), IMAGES[:1])
    assert same_bits(from_npy(body), vectors[0][None])
    [_, tokens] = tokens_of(dtype)
    body, _ = written([tokens], options(format="npy", dtype=dtype, pooling="none"), IMAGES[1:])
    assert same_bits(from_npy(body), tokens)


def test_npy_header_says_little_endian() -> None:
    body, _ = written([numbers(4)], options(format="npy"), IMAGES[:1])
    assert b"'descr': '<f4'" in body[:128]


@pytest.mark.parametrize("dtype", DTYPES)
def test_vllm_reads_the_content_parts(dtype: str) -> None:
    tokens = tokens_of(dtype)
    body, media_type = written(tokens, options(format="vllm", dtype=dtype))
    assert media_type == "application/json"
    answer = VllmResponse.model_validate_json(body)
    assert (answer.model, answer.revision, answer.fingerprint) == ("org/model", "abc", "f" * 64)
    assert (answer.dtype, answer.token_width) == (dtype, 12)
    for got, sent in zip(from_vllm(body), tokens, strict=True):
        assert same_bits(got, sent)


@pytest.mark.parametrize(("dtype", "is_npy"), [("float32", True), ("float16", True), ("bfloat16", False)])
def test_only_bfloat16_is_a_torch_file(dtype: str, is_npy: bool) -> None:
    body, _ = written(tokens_of(dtype), options(format="vllm", dtype=dtype))
    part = VllmResponse.model_validate_json(body).content[0]
    assert base64.b64decode(part.image_embeds.image_embeds).startswith(b"\x93NUMPY") is is_npy


def test_content_part_holds_only_the_rows_of_its_image() -> None:
    tokens = [torch.full((rows, 64), float(rows), dtype=torch.bfloat16) for rows in (2, 6)]
    body, _ = written(tokens, options(format="vllm"))
    files = [
        base64.b64decode(part.image_embeds.image_embeds)
        for part in VllmResponse.model_validate_json(body).content
    ]
    for file, own, other in zip(files, tokens, reversed(tokens), strict=True):
        assert file_tensor(file).untyped_storage().nbytes() == own.nbytes
        assert own.view(torch.uint8).numpy().tobytes() in file
        assert other[0].view(torch.uint8).numpy().tobytes() not in file


def test_single_image_is_saved_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> torch.Tensor:
        raise AssertionError("copied")

    tokens = numbers(6, 8, dtype="bfloat16")
    monkeypatch.setattr(torch.Tensor, "clone", fail)
    body, _ = written([tokens], options(format="vllm"), IMAGES[1:])
    assert json.loads(body)["token_width"] == 8


def uuids(model: ModelIdentity, images: Sequence[ImageFacts], dtype: str) -> list[str]:
    answer = serialize(model, options(format="vllm", dtype=dtype), images, tokens_of(dtype))
    return [part["uuid"] for part in json.loads(b"".join(answer.body))["content"]]


def test_uuid_changes_with_everything_that_changes_the_tokens() -> None:
    first, second = uuids(MODEL, IMAGES, "float16")
    assert [first, second] == uuids(replace(MODEL, name="other", revision=None), IMAGES, "float16")
    others = [
        *uuids(replace(MODEL, fingerprint="e" * 64), IMAGES, "float16"),
        *uuids(MODEL, IMAGES, "bfloat16"),
        *uuids(MODEL, [replace(image, sha256="2" * 64) for image in IMAGES], "float16")[:1],
    ]
    assert len({first, second, *others}) == 7


def test_uuid_is_the_documented_hash() -> None:
    # echo -n "ffff… 0000… float16" | sha256sum
    expected = "vs1-89121354a0d1895502916cae10b890e348c767d4ec3a8806ac6537fa760450c6"
    assert uuids(MODEL, IMAGES, "float16")[0] == expected


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_openai_answer_has_exactly_the_documented_members(encoding_format: str) -> None:
    vectors = [numbers(4, seed=n) for n in range(2)]
    body, media_type = written(vectors, openai_options({"encoding_format": encoding_format}, None))
    assert media_type == "application/json"
    answer = OpenAIResponse.model_validate_json(body)
    assert (answer.model, [entry.index for entry in answer.data]) == ("org/model", [0, 1])
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (8, 8)
    for got, sent in zip(from_json(body), vectors, strict=True):
        assert same_bits(got, sent)
    is_text = [isinstance(entry.embedding, str) for entry in answer.data]
    assert is_text == [encoding_format == "base64"] * 2


@pytest.mark.parametrize("form", ["safetensors", "npy", "vllm"])
def test_non_finite_number_is_refused_in_every_format(form: str) -> None:
    tokens = numbers(6, 4)
    tokens[5, 3] = float("inf")
    asked = options(format=form, pooling="none")
    with pytest.raises(NonFiniteOutput) as caught:
        serialize(MODEL, asked, IMAGES[1:], [tokens])
    assert caught.value.param == "images[0]"


def test_non_finite_number_is_found_in_a_large_tensor() -> None:
    tokens = torch.zeros(3000, 1024)
    tokens[2999, 1023] = float("nan")
    with pytest.raises(NonFiniteOutput):
        serialize(MODEL, options(format="npy", pooling="none"), IMAGES[1:], [tokens])


def test_non_contiguous_rows_are_written_in_order() -> None:
    tokens = numbers(6, 8)[:, :4]
    for form, read in (("npy", from_npy), ("safetensors", lambda body: from_safetensors(body)[0])):
        body, _ = written([tokens], options(format=form, pooling="none"), IMAGES[1:])
        assert same_bits(read(body), tokens)


@pytest.mark.parametrize(
    ("form", "read"), [("npy", from_npy), ("safetensors", lambda body: from_safetensors(body)[0])]
)
def test_large_file_shares_memory_with_the_tensor(form: str, read: Callable[[bytes], torch.Tensor]) -> None:
    """A copy would hold the interpreter lock while it is made."""
    tokens = torch.zeros(1024, 512)
    image = replace(IMAGES[1], num_tokens=1024)
    answer = serialize(MODEL, options(format=form, pooling="none"), [image], [tokens])
    tokens[0, 0] = 5.0
    assert read(b"".join(answer.body))[0, 0] == 5.0


def test_numbers_of_a_safetensors_file_are_aligned() -> None:
    vectors = [numbers(5), numbers(5)]
    [body] = serialize(MODEL, options(format="safetensors"), IMAGES, vectors).body
    assert int.from_bytes(bytes(body)[:8], "little") % 8 == 0
    assert same_bits(safetensors.torch.load(bytes(body))["embeddings"], torch.stack(vectors))


@given(st.lists(st.binary(max_size=20)))
@hypothesis_settings(derandomize=True, deadline=None)
def test_base64_written_in_pieces_equals_base64_of_the_whole(pieces: list[bytes]) -> None:
    writer = Base64Writer()
    for piece in pieces:
        assert writer.write(memoryview(piece)) == len(piece)
    assert b"".join(writer.finish()) == base64.b64encode(b"".join(pieces))


@pytest.mark.parametrize("num_bytes", [786_431, 786_432, 786_433, 2_000_000])
def test_base64_of_more_than_a_slice(num_bytes: int) -> None:
    data = np.random.default_rng(0).bytes(num_bytes)
    writer = Base64Writer()
    writer.write(b"x")
    writer.write(data)
    assert b"".join(writer.finish()) == base64.b64encode(b"x" + data)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([1, 2, 3], [6]),
        ([5, 2**20, 5, 6], [5, 2**20, 11]),
        ([2**20, 2**20], [2**20, 2**20]),
        ([2**19, 2**19, 7], [2**20, 7]),
        ([0, 3, 0], [3]),
    ],
)
def test_small_pieces_are_joined_and_large_pieces_kept(lengths: list[int], expected: list[int]) -> None:
    pieces: list[Piece] = [bytes([index + 1]) * length for index, length in enumerate(lengths)]
    joined = join_pieces(pieces)
    assert [len(piece) for piece in joined] == expected
    assert b"".join(joined) == b"".join(pieces)


def test_num_bytes_is_the_length_of_the_body() -> None:
    assert Answer((b"abc", memoryview(b"de")), "text/plain").num_bytes == 5

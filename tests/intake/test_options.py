"""Options of a request: values, conflicts, defaults."""

from __future__ import annotations

import re
from typing import cast

import pytest
import torch

from models import OutputSpec
from service.answers.answer_options import MAX_JSON_FLOATS, AnswerOptions, EmbedFormat
from service.errors import ApiError, BadRequest, NotAcceptable
from service.intake.options import (
    check_options,
    openai_options,
    resolve_options,
)
from tests.support.measuring import growth

DEFAULTS = AnswerOptions(
    pooling="mean",
    normalize=True,
    deepstack=False,
    dtype="float32",
    encoding_format="float",
    format="json",
)


def refusal(sent: dict[str, str | bool], accept: str | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        resolve_options(sent, accept)
    return caught.value


def test_defaults_apply_where_they_can() -> None:
    assert resolve_options({}, None) == DEFAULTS
    tokens = resolve_options({"pooling": "none"}, None)
    assert (tokens.normalize, tokens.deepstack) == (False, False)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({}, OutputSpec(pooled=True, normalize=True, deepstack=False, dtype=torch.float32)),
        ({"normalize": "0"}, OutputSpec(pooled=True, deepstack=False, dtype=torch.float32)),
        ({"pooling": "none"}, OutputSpec(deepstack=False, dtype=torch.float32)),
        (
            {"pooling": "none", "deepstack": True, "dtype": "bfloat16", "encoding_format": "base64"},
            OutputSpec(deepstack=True, dtype=torch.bfloat16),
        ),
        (
            {"dtype": "float16", "encoding_format": "base64"},
            OutputSpec(pooled=True, normalize=True, deepstack=False, dtype=torch.float16),
        ),
    ],
)
def test_output_spec_holds_what_the_encoder_needs(sent: dict[str, str | bool], expected: OutputSpec) -> None:
    assert resolve_options(sent, None).output_spec() == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("true", True),
        ("True", True),
        ("TRUE", True),
        ("1", True),
        (True, True),
        ("false", False),
        ("False", False),
        ("FALSE", False),
        ("0", False),
        (False, False),
    ],
)
def test_boolean_may_be_a_word_in_any_case_a_digit_or_a_boolean(value: str | bool, expected: bool) -> None:
    assert resolve_options({"normalize": value}, None).normalize is expected
    check_options({"normalize": value})


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"pooling": "max"}, "pooling"),
        ({"pooling": "Mean"}, "pooling"),
        ({"pooling": ""}, "pooling"),
        ({"pooling": True}, "pooling"),
        ({"normalize": "yes"}, "normalize"),
        ({"normalize": "None"}, "normalize"),
        ({"normalize": " true"}, "normalize"),
        ({"normalize": "1.0"}, "normalize"),
        ({"normalize": "tru\u0130"}, "normalize"),
        ({"normalize": "true1"}, "normalize"),
        ({"normalize": "falsee"}, "normalize"),
        ({"normalize": "false "}, "normalize"),
        ({"normalize": ""}, "normalize"),
        ({"deepstack": "2"}, "deepstack"),
        ({"dtype": "float64"}, "dtype"),
        ({"dtype": "Float32"}, "dtype"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"encoding_format": "BASE64"}, "encoding_format"),
        ({"format": "openai"}, "format"),
        ({"format": "JSON"}, "format"),
    ],
)
def test_value_that_is_not_in_the_table_is_refused(sent: dict[str, str | bool], param: str) -> None:
    error = refusal(sent)
    assert (error.status, error.code, error.param) == (400, "invalid_option", param)
    assert error.message.startswith(f"{param} must be ")


def test_time_to_refuse_a_boolean_does_not_grow_with_its_length() -> None:
    values = {size: "\u0130" * size for size in (100_000, 400_000)}

    def refuse(size: int) -> None:
        for _ in range(20):
            refusal({"normalize": values[size]})

    assert growth(refuse, 100_000) < 2


def test_error_shows_the_value_escaped_and_cut() -> None:
    assert refusal({"pooling": "\ud800\n"}).message == 'pooling must be mean or none, not "\\ud800\\n"'
    assert len(refusal({"pooling": "x" * 1000}).message) <= 100


def test_error_for_a_value_lists_the_valid_values() -> None:
    message = refusal({"format": "npz"}).message
    assert message == 'format must be json or safetensors or npy or vllm or handoff, not "npz"'


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"pooling": "none", "normalize": "true"}, "normalize"),
        ({"deepstack": "true"}, "deepstack"),
        ({"pooling": "mean", "deepstack": True}, "deepstack"),
        ({"dtype": "float16"}, "dtype"),
        ({"dtype": "bfloat16", "encoding_format": "float"}, "dtype"),
        ({"format": "safetensors", "encoding_format": "base64"}, "encoding_format"),
        ({"format": "npy", "encoding_format": "float"}, "encoding_format"),
        ({"format": "vllm", "encoding_format": "base64"}, "encoding_format"),
        ({"format": "npy", "dtype": "bfloat16"}, "dtype"),
        ({"format": "safetensors", "deepstack": True}, "deepstack"),
        ({"format": "npy", "pooling": "none", "normalize": True}, "normalize"),
        ({"format": "vllm", "pooling": "mean"}, "pooling"),
        ({"format": "vllm", "normalize": True}, "normalize"),
        ({"format": "vllm", "deepstack": False}, "deepstack"),
    ],
)
def test_options_that_cannot_apply_together_conflict(sent: dict[str, str | bool], param: str) -> None:
    error = refusal(sent)
    assert (error.status, error.code, error.param) == (400, "option_conflict", param)
    if "dtype" not in sent or len(sent) > 1:  # a further option could make a lone dtype valid
        with pytest.raises(BadRequest, match=re.escape(error.message)):
            check_options({"pooling": "mean", **sent} if param == "deepstack" else sent)


@pytest.mark.parametrize(
    ("accept", "sent", "param"),
    [
        ("application/x-npy", {"dtype": "bfloat16"}, "dtype"),
        ("application/x-safetensors", {"encoding_format": "float"}, "encoding_format"),
    ],
)
def test_format_from_the_accept_header_conflicts_like_an_explicit_one(
    accept: str, sent: dict[str, str | bool], param: str
) -> None:
    error = refusal(sent, accept)
    assert (error.status, error.code, error.param) == (400, "option_conflict", param)


@pytest.mark.parametrize(
    "sent",
    [
        {"pooling": "none", "normalize": "false"},
        {"pooling": "mean", "deepstack": "false"},
        {"dtype": "float32", "encoding_format": "float"},
        {"format": "vllm", "pooling": "none", "normalize": "false", "deepstack": "true"},
        {"format": "npy", "pooling": "none", "dtype": "float16"},
        {"format": "safetensors", "dtype": "bfloat16"},
    ],
)
def test_explicit_default_does_not_conflict(sent: dict[str, str | bool]) -> None:
    resolve_options(sent, None)


@pytest.mark.parametrize(
    ("accept", "acceptable"),
    [
        (None, True),
        ("", True),
        ("*/*", True),
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("application/*;q=0.1", True),
        ("text/html, */*;q=0.1", True),
        ("application/json;q=0.001", True),
        ("text/html", False),
        ("application/x-safetensors;q=0", False),
        ("application/json;q=0", False),
        ("application/json;q=0, text/*", False),
        ("application/*;q=0, */*", False),
        ("*/*;q=0", False),
        ("application/json;q=high", False),
        ("application/json;q=7", False),
        ("application/json;q=nan", False),
        (";;,,", False),
    ],
)
def test_accept_header_that_allows_nothing_served_is_406(accept: str | None, acceptable: bool) -> None:
    if acceptable:
        resolve_options({}, accept)
    else:
        error = refusal({}, accept)
        assert (error.status, error.code) == (406, "not_acceptable")


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, "json"),
        ("*/*", "json"),
        ("application/x-safetensors", "safetensors"),
        ("application/x-npy", "npy"),
        ("application/x-npy, application/x-safetensors", "safetensors"),
        ("application/x-npy;q=0.9, application/x-safetensors;q=0.8, */*;q=0.1", "npy"),
        ("application/x-safetensors, */*;q=0.8", "safetensors"),
        ("application/json;q=0, */*", "safetensors"),
        ("application/*", "json"),
        ("text/html, application/x-npy;q=0.2", "npy"),
    ],
)
def test_accept_header_decides_the_format(accept: str | None, expected: str) -> None:
    assert resolve_options({}, accept).format == expected
    assert resolve_options({"format": "vllm"}, accept).format == "vllm"


@pytest.mark.parametrize("form", ["safetensors", "npy"])
def test_files_default_to_pooled_float32(form: str) -> None:
    options = resolve_options({"format": form}, None)
    assert options == AnswerOptions("mean", True, False, "float32", None, cast(EmbedFormat, form))


def test_vllm_defaults_to_all_columns_in_the_models_own_dtype() -> None:
    options = resolve_options({"format": "vllm"}, None)
    assert options == AnswerOptions("none", False, True, None, None, "vllm")
    assert options.output_spec() == OutputSpec(dtype=None)
    assert resolve_options({"format": "vllm", "dtype": "float16"}, None).dtype == "float16"


def test_openai_options_are_fixed_except_the_encoding() -> None:
    assert openai_options({}, None) == AnswerOptions("mean", True, False, "float32", "float", "openai")
    assert openai_options({"encoding_format": "base64"}, "application/json").encoding_format == "base64"
    with pytest.raises(NotAcceptable):
        openai_options({}, "application/x-npy")
    with pytest.raises(BadRequest, match="float or base64"):
        openai_options({"encoding_format": "hex"}, None)


@pytest.mark.parametrize(
    ("form", "pooling", "num_images", "fits"),
    [
        ("npy", "none", 1, True),
        ("npy", "none", 2, False),
        ("npy", "mean", 2, True),
        ("safetensors", "none", 2, True),
    ],
)
def test_npy_may_hold_tokens_of_one_image_only(form: str, pooling: str, num_images: int, fits: bool) -> None:
    options = resolve_options({"format": form, "pooling": pooling}, None)
    sizes = {"num_images": num_images, "num_tokens": 2**24, "hidden_size": 4, "width": 16}
    if fits:
        options.check_size(**sizes)
        return
    with pytest.raises(BadRequest, match="format=safetensors") as caught:
        options.check_size(**sizes)
    assert (caught.value.code, caught.value.param) == ("option_conflict", "format")


def test_explicit_format_overrides_the_accept_header() -> None:
    assert resolve_options({"format": "json"}, "text/html") == DEFAULTS


@pytest.mark.parametrize(
    ("sent", "counts", "fits"),
    [
        ({"pooling": "none"}, (1, MAX_JSON_FLOATS // 4), True),
        ({"pooling": "none"}, (1, MAX_JSON_FLOATS // 4 + 1), False),
        ({"pooling": "none", "deepstack": True}, (1, MAX_JSON_FLOATS // 16), True),
        ({"pooling": "none", "deepstack": True}, (1, MAX_JSON_FLOATS // 16 + 1), False),
        ({"pooling": "none", "encoding_format": "base64"}, (1, MAX_JSON_FLOATS), True),
        ({"pooling": "mean"}, (2, MAX_JSON_FLOATS), True),
        ({"pooling": "mean"}, (MAX_JSON_FLOATS // 4 + 1, MAX_JSON_FLOATS), False),
    ],
)
def test_json_floats_have_a_limit(sent: dict[str, str | bool], counts: tuple[int, int], fits: bool) -> None:
    options = resolve_options(sent, None)
    num_images, num_tokens = counts

    def check() -> None:
        options.check_size(num_images=num_images, num_tokens=num_tokens, hidden_size=4, width=16)

    if fits:
        check()
        return
    with pytest.raises(ApiError, match="encoding_format=base64 or.*format=safetensors") as caught:
        check()
    assert (caught.value.status, caught.value.code) == (400, "response_too_large")

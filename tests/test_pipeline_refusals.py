"""Requests that the pipeline refuses, and before which step."""

from __future__ import annotations

import base64
import json

import pytest

from service.config.settings import Settings
from tests.support.app import encode_image, only
from tests.support.exchange import Exchange, RecordingPreprocessor, Source, json_exchange


def test_query_parameter_wins_over_the_body(settings: Settings) -> None:
    exchange = json_exchange(encode_image(), pooling="none", normalize=False)
    exchange.scope["query_string"] = b"pooling=mean"
    source = Source()
    exchange.run(source, settings)
    output = source.submitted[0][0].output
    assert (output.pooled, output.normalize) == (True, False)


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ("poling=none", "invalid_option", "poling"),
        ("pooling=max", "invalid_option", "pooling"),
        ("normalize=maybe", "invalid_option", "normalize"),
        ("normalize=1&pooling=none", "option_conflict", "normalize"),
        ("deepstack=1&pooling=mean", "option_conflict", "deepstack"),
        ("dtype=float16&encoding_format=float", "option_conflict", "dtype"),
    ],
)
def test_a_bad_query_is_refused_before_the_body_is_read(
    query: str, code: str, param: str, settings: Settings
) -> None:
    body = {"images": base64.b64encode(encode_image()).decode(), "pooling": "none", "format": "json"}
    exchange = Exchange(json.dumps(body).encode(), "application/json", query=query)
    error = exchange.refusal(settings)
    assert (error.code, error.param) == (code, param)
    assert len(exchange.unread) == 1


@pytest.mark.parametrize(
    ("query", "accept", "code"),
    [("deepstack=1", "*/*", "option_conflict"), ("", "text/html", "not_acceptable")],
)
def test_raw_body_is_not_read_if_its_options_are_refused(
    query: str, accept: str, code: str, settings: Settings
) -> None:
    exchange = Exchange(encode_image(), query=query, headers=[("accept", accept)])
    assert exchange.refusal(settings).code == code
    assert len(exchange.unread) == 1


def test_options_in_the_body_may_resolve_a_conflict(settings: Settings) -> None:
    body = {"images": base64.b64encode(encode_image()).decode(), "pooling": "none", "format": "json"}
    content = json.dumps(body).encode()
    accept = [("accept", "text/html")]
    Exchange(content, "application/json", query="deepstack=1", headers=accept).run(Source(), settings)


def test_all_headers_are_checked_before_any_pixels_are_decoded(settings: Settings) -> None:
    truncated = encode_image(64, 64)[:-200]
    preprocessor = RecordingPreprocessor()
    error = json_exchange(truncated, encode_image(), b"no image").refusal(settings, Source(preprocessor))
    assert (error.status, error.code, error.param) == (400, "invalid_image", "images[2]")
    assert preprocessor.threads == []


@pytest.mark.parametrize("num_good", [0, 1, 4])
def test_the_first_broken_image_is_named(num_good: int, settings: Settings) -> None:
    truncated = encode_image(64, 64)[:-200]
    source = Source()
    error = json_exchange(*[encode_image()] * num_good, truncated, truncated).refusal(settings, source)
    assert (error.status, error.code, error.param) == (400, "invalid_image", f"images[{num_good}]")
    assert source.submitted == []


def test_tokens_of_a_request_have_a_limit(settings: Settings) -> None:
    small = only(settings, max_request_tokens=7)
    four, three = encode_image(64, 64), encode_image(32, 96)
    json_exchange(four, three).run(Source(), small)
    error = json_exchange(four, four, three).refusal(small)
    assert (error.status, error.code, error.param) == (413, "too_many_tokens", "images[1]")
    assert "8 tokens" in error.message
    assert "7" in error.message
    assert Exchange(encode_image(64, 128)).refusal(small).param == "images[0]"


def test_limits_of_one_image_name_it(settings: Settings) -> None:
    error = json_exchange(encode_image(), encode_image(100, 100)).refusal(
        only(settings, max_image_pixels=9999)
    )
    assert (error.status, error.code, error.param) == (413, "too_many_pixels", "images[1]")


def test_extreme_aspect_ratio_is_refused(settings: Settings) -> None:
    error = json_exchange(encode_image(), encode_image(2, 402)).refusal(settings)
    assert (error.status, error.code, error.param) == (400, "invalid_aspect_ratio", "images[1]")
    assert "402 x 2" in error.message


def test_too_many_json_floats_are_refused_before_pixels_are_decoded(settings: Settings) -> None:
    preprocessor = RecordingPreprocessor()
    source = Source(preprocessor)
    source.encoder.hidden_size = 4_194_304
    error = Exchange(encode_image(32, 64), query="pooling=none").refusal(settings, source)
    assert (error.status, error.code) == (400, "response_too_large")
    assert preprocessor.threads == []
    json_exchange(encode_image(32, 64), pooling="none", encoding_format="base64").run(source, settings)


def test_a_compressed_body_is_refused(settings: Settings) -> None:
    error = Exchange(encode_image(), headers=[("content-encoding", "gzip")]).refusal(settings)
    assert (error.status, error.code) == (415, "unsupported_content_type")
    for name in ("identity", "Identity"):
        Exchange(encode_image(), headers=[("content-encoding", name)]).run(Source(), settings)


def test_accept_may_come_in_several_lines(settings: Settings) -> None:
    lines = [("accept", "text/html"), ("accept", "application/json;q=0.5")]
    Exchange(encode_image(), headers=lines).run(Source(), settings)
    assert Exchange(encode_image(), headers=lines[:1]).refusal(settings).status == 406

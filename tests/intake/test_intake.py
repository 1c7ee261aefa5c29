"""What the head of a request decides before its body is read, and the options that come of both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import pytest

from service.answers.answer_options import AnswerOptions
from service.errors import ApiError
from service.intake import intake as module
from service.intake.content_type import parse_content_type
from service.intake.intake import Intake, embed_intake, openai_intake
from service.intake.openai_body import ServedModel
from service.intake.options import resolve_options
from service.intake.request_head import RequestHead
from service.routes.openapi import PIXEL
from tests.support.bodies import LIMITS, MULTIPART, multipart, option_part, run_inline, stream
from tests.support.bodies import image_part as form_image

SERVED = ServedModel("org/model", hidden_size=128)


def head_of(content_type: str | None = "image/png", **fields: object) -> RequestHead:
    return RequestHead(parse_content_type(content_type), **fields)  # type: ignore[arg-type]


def refusal(head: RequestHead) -> str:
    """The code with which a head alone is refused."""
    with pytest.raises(ApiError) as caught:
        embed_intake(head, LIMITS)
    return caught.value.code


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (head_of(content_length=300_001), "body_too_large"),
        (head_of("application/json", content_length=10**19 - 1), "body_too_large"),
        (head_of(content_encoding="gzip"), "unsupported_content_type"),
        (head_of("text/plain", content_length=5), "unsupported_content_type"),
        (head_of(None), "unsupported_content_type"),
        (head_of("multipart/form-data"), "invalid_body"),
        (head_of(query=b"poling=none"), "invalid_option"),
        (head_of(query=b"deepstack=1"), "option_conflict"),
        (head_of(accept="text/html"), "not_acceptable"),
        (head_of("application/json", query=b"deepstack=1&pooling=mean"), "option_conflict"),
        (head_of(MULTIPART, query=b"normalize=maybe"), "invalid_option"),
    ],
)
def test_a_head_that_no_body_could_make_valid_is_refused(head: RequestHead, code: str) -> None:
    assert refusal(head) == code


def test_the_head_of_the_openai_route_is_checked_alike() -> None:
    for head, code in [
        (head_of("image/png"), "unsupported_content_type"),
        (head_of("application/json", content_encoding="br"), "unsupported_content_type"),
        (head_of("application/json", content_length=300_001), "body_too_large"),
    ]:
        with pytest.raises(ApiError) as caught:
            openai_intake(head, LIMITS, SERVED)
        assert caught.value.code == code


@pytest.mark.parametrize(("content_length", "num_bytes"), [(None, 0), (0, 0), (300_000, 300_000)])
def test_an_intake_knows_the_announced_number_of_bytes(content_length: int | None, num_bytes: int) -> None:
    assert embed_intake(head_of(content_length=content_length), LIMITS).num_bytes == num_bytes


def read(intake: Intake, body: bytes) -> tuple[tuple[object, ...], str, str]:
    images, options = asyncio.run(intake.read(stream([body]), run_inline))
    return images, options.pooling, options.format


def test_options_of_the_query_win_over_those_of_the_body() -> None:
    document = json.dumps({"images": PIXEL, "pooling": "none", "format": "npy"}).encode()
    intake = embed_intake(head_of("application/json", query=b"pooling=mean"), LIMITS)
    assert read(intake, document)[1:] == ("mean", "npy")
    form = multipart(option_part("pooling", b"none"), form_image(b"x"))
    assert read(embed_intake(head_of(MULTIPART, query=b"format=npy"), LIMITS), form)[1:] == ("none", "npy")


def test_options_in_a_body_may_resolve_what_the_head_leaves_open() -> None:
    document = json.dumps({"images": PIXEL, "pooling": "none", "format": "json"}).encode()
    head = head_of("application/json", query=b"deepstack=1", accept="text/html")
    assert read(embed_intake(head, LIMITS), document)[1:] == ("none", "json")


def test_options_of_a_raw_body_are_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counting(sent: Mapping[str, str | bool], accept: str | None) -> AnswerOptions:
        calls.append(sent)
        return resolve_options(sent, accept)

    monkeypatch.setattr(module, "resolve_options", counting)
    assert read(embed_intake(head_of(query=b"pooling=none"), LIMITS), b"x") == ((b"x",), "none", "json")
    assert len(calls) == 1


def test_options_of_the_openai_route_are_its_own() -> None:
    document = json.dumps({"input": PIXEL, "encoding_format": "base64"}).encode()
    intake = openai_intake(head_of("application/json"), LIMITS, SERVED)
    assert read(intake, document)[1:] == ("mean", "openai")

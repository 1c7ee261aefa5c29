"""`/embed` through the whole app: bodies, options, refusals and limits."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from urllib.parse import urlencode

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from models import EncodeItem, OutputSpec
from service.config.settings import Settings
from service.intake.options import OPTION_NAMES
from service.routes.openapi import PIXEL
from service.routes.schemas import EmbedResponse
from tests.support.answers import error_of, message_of
from tests.support.app import (
    FINGERPRINT,
    HIDDEN_SIZE,
    FakeEncoder,
    FakeRunning,
    Service,
    encode_image,
    known_embedding,
    only,
)
from tests.support.app_requests import Serve


def test_embed_answers_the_embedding_of_an_image(service: Service) -> None:
    image = encode_image()
    response = service.embed(image)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    body = EmbedResponse.model_validate_json(response.content)
    [entry] = body.data
    [[item]] = service.encoder.batches
    assert entry.embedding == pytest.approx(known_embedding(item.patches, item.output).tolist())
    assert item.output == OutputSpec(pooled=True, normalize=True, deepstack=False, dtype=torch.float32)
    assert np.linalg.norm(entry.embedding) == pytest.approx(1)
    assert (body.model, body.fingerprint, entry.sha256) == (
        "demo",
        FINGERPRINT,
        hashlib.sha256(image).hexdigest(),
    )
    timing = re.findall(r"(\w+);dur=[0-9.]+", response.headers["server-timing"])
    assert timing == ["read", "decode", "queue", "encode", "serialize", "total"]


def test_the_three_forms_of_a_body_give_the_same_answer(service: Service) -> None:
    image = encode_image()
    raw = service.embed(image, "?normalize=false").json()
    form = service.embed_form(image, normalize="false").json()
    text = base64.b64encode(image).decode()
    json_body = service.request("POST", "/embed", json={"images": text, "normalize": False}).json()
    assert raw["data"] == form["data"] == json_body["data"]


def test_all_options_reach_the_encoder(service: Service) -> None:
    query = "?pooling=none&deepstack=true&dtype=float16&encoding_format=base64&format=json"
    body = EmbedResponse.model_validate_json(service.embed(encode_image(), query).content)
    [[item]] = service.encoder.batches
    assert item.output == OutputSpec(deepstack=True, dtype=torch.float16)
    assert (body.dtype, body.data[0].shape) == ("float16", [6, HIDDEN_SIZE * 3])
    assert isinstance(body.data[0].embedding, str)


@pytest.mark.parametrize(
    ("query", "headers", "expected", "message"),
    [
        ("?poling=mean", {}, (400, "invalid_option", "poling"), 'unknown query parameter "poling"'),
        ("?pooling=max", {}, (400, "invalid_option", "pooling"), 'must be mean or none, not "max"'),
        ("?deepstack=1", {}, (400, "option_conflict", "deepstack"), "pooling=none only"),
        ("?format=npz", {}, (400, "invalid_option", "format"), 'or npy or vllm or handoff, not "npz"'),
        ("", {"accept": "text/html"}, (406, "not_acceptable", None), "answers application/json"),
        ("", {"accept": "," * 5000}, (431, "headers_too_large", None), "the Accept header has more than"),
        ("", {"content_type": "image/png" + ";" * 1100}, (431, "headers_too_large", None), "Content-Type"),
        (
            "",
            {"content_type": "text/plain"},
            (415, "unsupported_content_type", None),
            "text/plain is not served; served are image/*",
        ),
        ("", {"content_type": "application/json"}, (400, "invalid_json", None), "not UTF-8"),
        (
            "",
            {"content_encoding": "gzip"},
            (415, "unsupported_content_type", None),
            "without Content-Encoding",
        ),
    ],
)
def test_refusals_of_embed(
    query: str,
    headers: dict[str, str],
    expected: tuple[int, str, str | None],
    message: str,
    service: Service,
) -> None:
    response = service.embed(encode_image(), query, **headers)
    assert error_of(response) == expected
    assert message in message_of(response)
    assert service.encoder.batches == []
    assert service.metric("errors_total", code=expected[1]) == 1
    assert service.metric("requests_total", route="/embed", status=str(expected[0])) == 1


def test_if_one_image_fails_the_request_fails_and_names_it(service: Service) -> None:
    response = service.embed_form(encode_image(), b"no image", encode_image())
    assert error_of(response) == (400, "invalid_image", "images[1]")
    assert "not an image; the formats served are JPEG" in message_of(response)
    assert service.encoder.batches == []


TEXT = st.text(st.characters(codec=None, categories=None), max_size=70)


@hypothesis_settings(
    derandomize=True,
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    document=st.dictionaries(
        st.sampled_from(["images", *OPTION_NAMES]) | TEXT,
        TEXT | st.booleans() | st.lists(TEXT | st.fixed_dictionaries({"data": TEXT}), max_size=2),
        max_size=3,
    ),
    name=TEXT,
)
@example(document={"images": PIXEL, "pooling": "\ud800"}, name="pooling")
@example(document={"images": PIXEL, "\ud800": "x"}, name="\udfff")
@example(document={"images": {"data": PIXEL, "\ud800": "x"}}, name="dtype")
@example(document={"images": "\ud800"}, name="x")
def test_error_about_any_text_of_a_client_can_be_sent(
    document: dict[str, object], name: str, service: Service
) -> None:
    response = service.embed(json.dumps(document).encode(), content_type="application/json")
    assert response.status_code in (200, 400, 413, 422)
    query = urlencode({name: name}, errors="surrogatepass")
    response = service.embed(encode_image(), f"?{query}")
    assert error_of(response)[0] == 400
    assert response.content.isascii()


@pytest.mark.parametrize(
    ("changes", "expected", "message"),
    [
        ({"max_body_bytes": 1000, "max_image_bytes": 1000}, (413, "body_too_large", None), "1000 bytes"),
        ({"max_image_bytes": 1000}, (413, "image_too_large", "images[0]"), "1000 bytes"),
        ({"max_image_pixels": 1000}, (413, "too_many_pixels", "images[0]"), "6,144 pixels (96 x 64)"),
        ({"max_images_per_request": 1}, (413, "too_many_images", "images"), "1 images allowed"),
        (
            {"max_request_tokens": 5},
            (413, "too_many_tokens", "images[0]"),
            "6 tokens, and a request",
        ),
    ],
)
def test_every_limit_of_the_settings_holds(
    changes: dict[str, int],
    expected: tuple[int, str, str | None],
    message: str,
    serve: Serve,
    settings: Settings,
) -> None:
    response = serve(only(settings, **changes)).embed_form(encode_image(), encode_image())
    assert error_of(response) == expected
    assert message in message_of(response)


def test_numbers_that_are_not_finite_are_an_error(serve: Serve) -> None:
    class Broken(FakeEncoder):
        def launch(self, items: Sequence[EncodeItem]) -> FakeRunning:
            result = super().launch(items).wait()
            result.embeddings[0][0] = float("nan")
            return FakeRunning(lambda: result)

    service = serve(encoders=[Broken()])
    assert error_of(service.embed(encode_image())) == (500, "non_finite_output", "images[0]")


def test_a_batch_that_fails_is_an_internal_error_and_the_next_one_works(serve: Serve) -> None:
    failing = [True]

    def fail(items: Sequence[EncodeItem]) -> None:
        if failing.pop() if failing else False:
            raise RuntimeError("/secret/path")

    service = serve(encoders=[FakeEncoder(fail)])
    response = service.embed(encode_image())
    assert error_of(response) == (500, "internal_error", "images[0]")
    assert message_of(response) == "the encoder failed on this image"
    assert "secret" not in response.text
    assert service.embed(encode_image()).status_code == 200

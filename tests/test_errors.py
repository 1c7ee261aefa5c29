import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.errors import (
    ERROR_CODES,
    ERROR_STATUSES,
    ApiError,
    BadRequest,
    BodyTimeout,
    DeadlineExceeded,
    HeadersTooLarge,
    InternalError,
    InvalidShape,
    LlmTimeout,
    LlmUnreachable,
    MethodNotAllowed,
    NonFiniteOutput,
    NotAcceptable,
    NotFound,
    TooLarge,
    TooManyRequests,
    Unauthorized,
    Unavailable,
    UnsupportedMedia,
    UpstreamFailed,
    UpstreamTimeout,
    printable,
)

EXAMPLES: list[tuple[ApiError, int, str, str]] = [
    (BadRequest("m", code="invalid_image"), 400, "invalid_request_error", "invalid_image"),
    (Unauthorized("m"), 401, "invalid_request_error", "invalid_api_key"),
    (NotFound("m"), 404, "invalid_request_error", "not_found"),
    (MethodNotAllowed("m", allow="GET, HEAD"), 405, "invalid_request_error", "method_not_allowed"),
    (NotAcceptable("m"), 406, "invalid_request_error", "not_acceptable"),
    (BodyTimeout("m"), 408, "invalid_request_error", "body_timeout"),
    (TooLarge("m", code="too_many_pixels"), 413, "invalid_request_error", "too_many_pixels"),
    (
        UnsupportedMedia("m", code="unsupported_image_format"),
        415,
        "invalid_request_error",
        "unsupported_image_format",
    ),
    (TooManyRequests("m", code="queue_full", retry_after_s=1), 429, "rate_limit_error", "queue_full"),
    (TooManyRequests("m", code="too_many_bytes", retry_after_s=1), 429, "rate_limit_error", "too_many_bytes"),
    (HeadersTooLarge("m"), 431, "invalid_request_error", "headers_too_large"),
    (InvalidShape("m"), 422, "invalid_request_error", "invalid_request"),
    (InternalError("m"), 500, "server_error", "internal_error"),
    (NonFiniteOutput("m"), 500, "server_error", "non_finite_output"),
    (UpstreamFailed("m"), 502, "server_error", "image_url_failed"),
    (LlmUnreachable("m"), 502, "server_error", "llm_unreachable"),
    (Unavailable("m"), 503, "server_error", "not_ready"),
    (Unavailable("m", code="device_failed"), 503, "server_error", "device_failed"),
    (DeadlineExceeded(), 504, "timeout_error", "deadline_exceeded"),
    (UpstreamTimeout("m"), 504, "timeout_error", "image_url_timeout"),
    (LlmTimeout("m"), 504, "timeout_error", "llm_timeout"),
]


def _classes(root: type[ApiError]) -> set[type[ApiError]]:
    return {root}.union(*map(_classes, root.__subclasses__()))


def test_every_class_is_in_the_examples() -> None:
    assert {type(error) for error, *_ in EXAMPLES} == _classes(ApiError) - {ApiError}


@pytest.mark.parametrize(("error", "status", "kind", "code"), EXAMPLES)
def test_status_type_and_code(error: ApiError, status: int, kind: str, code: str) -> None:
    assert error.status == status
    message = (
        "the request was not answered within the server's time limit" if code == "deadline_exceeded" else "m"
    )
    assert error.body() == {"error": {"message": message, "type": kind, "param": None, "code": code}}
    assert str(error) == message


def test_code_of_every_class_is_in_the_closed_list() -> None:
    assert {error.code for error, *_ in EXAMPLES} | {cls.code for cls in _classes(ApiError)} <= set(
        ERROR_CODES
    )
    assert len(ERROR_CODES) == len(set(ERROR_CODES))


def test_closed_list_of_statuses_is_that_of_all_classes() -> None:
    assert tuple(sorted({error.status for error, *_ in EXAMPLES})) == ERROR_STATUSES
    assert {cls.status for cls in _classes(ApiError)} <= set(ERROR_STATUSES)


def test_param_may_be_given_or_added_later() -> None:
    error = InvalidShape("m", param="images")
    assert error.body()["error"]["param"] == "images"
    error.param = "images[3]"
    assert error.body()["error"]["param"] == "images[3]"


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (NotFound("m"), {}),
        (Unauthorized("m"), {"WWW-Authenticate": "Bearer"}),
        (MethodNotAllowed("m", allow="GET, HEAD"), {"Allow": "GET, HEAD"}),
        (BodyTimeout("m"), {}),
        (Unavailable("m"), {"Retry-After": "5"}),
        (TooManyRequests("m", code="queue_full", retry_after_s=7), {"Retry-After": "7"}),
        (DeadlineExceeded(), {}),
        (InternalError("m"), {}),
    ],
)
def test_headers_that_belong_to_an_error(error: ApiError, headers: dict[str, str]) -> None:
    assert error.headers() == headers


@given(text=st.text(max_size=100))
@example(text="\ud800")
@example(text="\U0001f600" * 100)
def test_text_of_a_client_is_shown_in_ascii_and_cut(text: str) -> None:
    shown = printable(text)
    assert shown.isascii()
    assert shown.isprintable()
    assert len(shown) <= 640

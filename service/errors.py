"""Every error that a client can see, with its status and its code. Knows nothing of HTTP frameworks.

ApiError
├── BadRequest            400   (code given where it is raised)
├── Unauthorized          401   invalid_api_key                          (with WWW-Authenticate)
├── NotFound              404   not_found · model_not_found · handoff_not_found
├── MethodNotAllowed      405   method_not_allowed
├── NotAcceptable         406   not_acceptable
├── BodyTimeout           408   body_timeout
├── TooLarge              413   (code given where it is raised)
├── UnsupportedMedia      415   (code given where it is raised)
├── InvalidShape          422   invalid_request
├── TooManyRequests       429   queue_full · too_many_bytes · handoff_full  (with Retry-After)
├── HeadersTooLarge       431   headers_too_large
├── InternalError         500   internal_error
├── NonFiniteOutput       500   non_finite_output
├── UpstreamFailed        502   image_url_failed
├── LlmUnreachable        502   llm_unreachable
├── Unavailable           503   not_ready · draining · device_failed     (with Retry-After)
├── UpstreamTimeout       504   image_url_timeout
├── LlmTimeout            504   llm_timeout
└── DeadlineExceeded      504   deadline_exceeded
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Literal, get_args

ErrorCode = Literal[
    "invalid_image",
    "invalid_aspect_ratio",
    "empty_input",
    "invalid_http",
    "invalid_body",
    "invalid_json",
    "invalid_base64",
    "invalid_option",
    "option_conflict",
    "response_too_large",
    "url_not_allowed",
    "text_not_supported",
    "image_url_rejected",
    "invalid_api_key",
    "not_found",
    "handoff_not_found",
    "model_not_found",
    "method_not_allowed",
    "not_acceptable",
    "body_timeout",
    "body_too_large",
    "image_too_large",
    "too_many_pixels",
    "too_many_images",
    "too_many_tokens",
    "unsupported_content_type",
    "unsupported_image_format",
    "invalid_request",
    "queue_full",
    "handoff_full",
    "too_many_bytes",
    "headers_too_large",
    "internal_error",
    "non_finite_output",
    "image_url_failed",
    "not_ready",
    "draining",
    "device_failed",
    "image_url_timeout",
    "llm_unreachable",
    "llm_timeout",
    "deadline_exceeded",
]
ERROR_CODES: tuple[ErrorCode, ...] = get_args(ErrorCode)


def printable(text: str) -> str:
    """Text from a client, cut and escaped, as error messages show it. They never hold it as it was sent."""
    return text[:64].encode("unicode_escape").decode("ascii")


def image_param(index: int) -> str:
    """The name of an image in errors, such as `images[3]`."""
    return f"images[{index}]"


class ApiError(Exception):
    """An error with a status and a body. `param` names the cause, such as `images[3]` or an option."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ErrorCode = "internal_error"
    retry_after_s: int | None = None

    def __init__(self, message: str, *, code: ErrorCode | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.code
        self.param = param

    def body(self) -> dict[str, dict[str, str | None]]:
        """The error body, which is the same on every route."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """The error's own headers, in addition to those of every response."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


@contextmanager
def renumbered(indices: Sequence[int]) -> Iterator[None]:
    """Errors within the block that name image `i` name image `indices[i]`: only some images were in it."""
    names = {image_param(position): image_param(index) for position, index in enumerate(indices)}
    try:
        yield
    except ApiError as error:
        if error.param is not None:
            error.param = names.get(error.param, error.param)
        raise


class BadRequest(ApiError):
    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, code: ErrorCode, param: str | None = None) -> None:
        super().__init__(message, code=code, param=param)


class Unauthorized(ApiError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class NotFound(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(ApiError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow

    def headers(self) -> dict[str, str]:
        return {"Allow": self.allow}


class NotAcceptable(ApiError):
    status = 406
    type = "invalid_request_error"
    code = "not_acceptable"


class BodyTimeout(ApiError):
    status = 408
    type = "invalid_request_error"
    code = "body_timeout"


class TooLarge(BadRequest):
    status = 413


class UnsupportedMedia(BadRequest):
    status = 415


class InvalidShape(ApiError):
    status = 422
    type = "invalid_request_error"
    code = "invalid_request"


class TooManyRequests(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, code: ErrorCode, retry_after_s: int) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class HeadersTooLarge(ApiError):
    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class InternalError(ApiError):
    status = 500
    code = "internal_error"


class NonFiniteOutput(ApiError):
    status = 500
    code = "non_finite_output"


class UpstreamFailed(ApiError):
    status = 502
    code = "image_url_failed"


class LlmUnreachable(ApiError):
    status = 502
    code = "llm_unreachable"


class LlmTimeout(ApiError):
    status = 504
    type = "timeout_error"
    code = "llm_timeout"


class Unavailable(ApiError):
    status = 503
    code = "not_ready"
    retry_after_s = 5


class UpstreamTimeout(ApiError):
    status = 504
    type = "timeout_error"
    code = "image_url_timeout"


class DeadlineExceeded(ApiError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"

    def __init__(self) -> None:
        super().__init__("the request was not answered within the server's time limit")


def _statuses(error: type[ApiError]) -> set[int]:
    return {error.status}.union(*map(_statuses, error.__subclasses__()))


ERROR_STATUSES = tuple(sorted(_statuses(ApiError)))

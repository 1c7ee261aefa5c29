"""The connections to the LLM server. Knows HTTP and its errors; knows nothing of bodies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from urllib.parse import urlsplit

import httpcore
import httpx

from service.chat.passed_headers import Headers
from service.errors import BadRequest, LlmTimeout, LlmUnreachable

_CONNECT_S = 5.0
# vLLM closes an idle connection after 5 s. This end must close it first, or a request could be on its way.
_KEEP_ALIVE_S = 4.0
_MAX_CONNECTIONS = 1024  # further requests wait
# The pool looks at all connections for each idle one.
_MAX_IDLE_CONNECTIONS = 64


class LlmClient:
    """One pool of connections to the LLM server. Follows no redirects and sends nothing twice."""

    def __init__(self, url: str, timeout_s: float, key: str | None = None) -> None:
        """`timeout_s`: longest time in which the LLM server may send nothing.

        `key`: the API key that is sent with each request.
        """
        parts = urlsplit(url)
        self._url = httpcore.URL(url)
        self._prefix = parts.path.rstrip("/").encode()
        self._own_headers: Headers = [(b"host", parts.netloc.encode())]
        if key is not None:
            self._own_headers.append((b"authorization", b"Bearer " + key.encode()))
        self._timeout_s = timeout_s
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=httpx.create_ssl_context() if parts.scheme == "https" else None,
            max_connections=_MAX_CONNECTIONS,
            max_keepalive_connections=_MAX_IDLE_CONNECTIONS,
            keepalive_expiry=_KEEP_ALIVE_S,
        )

    @asynccontextmanager
    async def ask(
        self, method: str, path: str, query: bytes, headers: Headers, body: bytes
    ) -> AsyncIterator[httpcore.Response]:
        """The answer, once its head is there. Leaving the block ends the request.

        Raises `LlmUnreachable` and `LlmTimeout`, also while the answer is read, and `BadRequest` for headers
        that cannot be sent.
        """
        url = self._url
        target = self._prefix + path.encode() + (b"?" + query if query else b"")
        timeouts = dict.fromkeys(("read", "write", "pool"), self._timeout_s) | {"connect": _CONNECT_S}
        asking = self._pool.stream(
            method,
            httpcore.URL(scheme=url.scheme, host=url.host, port=url.port, target=target),
            headers=[*self._own_headers, *headers],
            content=body or None,
            extensions={"timeout": timeouts},
        )
        with self._errors():
            async with asking as answer:
                if not 200 <= answer.status < 600:
                    raise LlmUnreachable(f"the LLM server answered with the status {answer.status}")
                yield answer

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._pool.aclose()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns the errors of httpcore into `ApiError`."""
        try:
            yield
        except (httpcore.ConnectError, httpcore.ConnectTimeout):
            raise LlmUnreachable("the LLM server cannot be reached") from None
        except httpcore.TimeoutException:
            raise LlmTimeout(f"the LLM server sent nothing for {self._timeout_s:g} s") from None
        except httpcore.LocalProtocolError:
            raise BadRequest(
                "the query or a header has characters that cannot be passed on", code="invalid_http"
            ) from None
        except (httpcore.NetworkError, httpcore.ProtocolError):
            raise LlmUnreachable("the LLM server ended the connection within its answer") from None

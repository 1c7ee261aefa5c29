"""Fetches the images of a request that are given as URLs, from the hosts that the settings allow.

`image_urls` checks each URL and each redirect, `dialling` each address. Bytes and time are limited while a
response arrives. Knows nothing of what an image is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpcore
import httpx

from service.config.settings import Settings
from service.errors import ApiError, BadRequest, TooLarge, UpstreamFailed, UpstreamTimeout, image_param
from service.fetching.dialling import AddressRefused, CheckingBackend, Resolve, SystemResolver
from service.fetching.image_urls import PORTS, ImageUrl, check_url, join_url, parse_url, url_refused

MAX_REDIRECTS = 3

_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_FETCHES_AT_ONCE = 8  # of one request; further images wait
_MAX_CONNECTIONS = 64  # of all requests; further fetches wait
_MAX_IDLE_CONNECTIONS = 16
_KEEP_ALIVE_S = 15.0


@dataclass(frozen=True)
class FetchLimits:
    """The limits on what is fetched for one request."""

    max_image_bytes: int
    max_bytes: int  # of all images together
    timeout_s: float  # from the start until all images have arrived


class _RequestBudget:
    """The bytes that one request may still fetch, and `slots` for its fetches that run at the same time."""

    def __init__(self, limits: FetchLimits, hold: Callable[[int], None]) -> None:
        self._limits = limits
        self._hold = hold
        self._num_bytes = 0
        self.slots = asyncio.Semaphore(_MAX_FETCHES_AT_ONCE)

    def add(self, num_bytes: int) -> None:
        """Counts bytes that arrived. Raises `TooLarge`, or what `hold` raises, if there are too many."""
        self._num_bytes += num_bytes
        if self._num_bytes > self._limits.max_bytes:
            message = f"the images have more than the {self._limits.max_bytes} bytes allowed together"
            raise TooLarge(message, code="body_too_large")
        self._hold(num_bytes)


class Fetcher:
    """Fetches images through one pool of connections, on one event loop. `aclose` closes the pool."""

    def __init__(
        self,
        domains: Sequence[str],
        limits: FetchLimits,
        backend: httpcore.AsyncNetworkBackend,
    ) -> None:
        """`domains` are hosts in their canonical spelling. If it is empty, every URL is refused."""
        self._domains = frozenset(domains)
        self._limits = limits
        # httpcore, on which httpx is built: no proxy, no cookies, no redirects, no decoding.
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=httpx.create_ssl_context() if domains else None,
            max_connections=_MAX_CONNECTIONS,
            max_keepalive_connections=_MAX_IDLE_CONNECTIONS,
            keepalive_expiry=_KEEP_ALIVE_S,
            network_backend=backend,
        )

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._pool.aclose()

    async def fetch(
        self, images: Sequence[bytes | ImageUrl], hold: Callable[[int], None] = lambda num_bytes: None
    ) -> list[bytes]:
        """Returns the images, with the bytes in place of each URL. Raises `ApiError`, which names the image.

        `hold` is called with the number of bytes that arrived, and may raise if the server has no room for
        them. All URLs are checked before the first is fetched. If one image fails, the others are dropped.
        """
        targets: dict[int, httpx.URL] = {}
        for index, image in enumerate(images):
            if isinstance(image, ImageUrl):
                targets[index] = self._check(image.url, index)
                await asyncio.sleep(0)  # the longest URL takes a few milliseconds
        fetched = await self._fetch_all(targets, _RequestBudget(self._limits, hold)) if targets else {}
        return [image if isinstance(image, bytes) else fetched[index] for index, image in enumerate(images)]

    def _check(self, url: str, index: int) -> httpx.URL:
        try:
            return check_url(parse_url(url), self._domains)
        except ApiError as error:
            error.param = image_param(index)
            raise

    async def _fetch_all(self, targets: Mapping[int, httpx.URL], budget: _RequestBudget) -> dict[int, bytes]:
        tasks = {index: asyncio.create_task(self._fetch_one(url, budget)) for index, url in targets.items()}
        try:
            await asyncio.wait(
                tasks.values(), timeout=self._limits.timeout_s, return_when=asyncio.FIRST_EXCEPTION
            )
            _raise_first(tasks, self._limits)
            return {index: task.result() for index, task in tasks.items()}
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            # The traceback of an error refers to this frame, and this frame to all images and to the error.
            del task
            tasks.clear()

    async def _fetch_one(self, url: httpx.URL, budget: _RequestBudget) -> bytes:
        async with budget.slots:
            for _ in range(MAX_REDIRECTS + 1):
                async with self._get(url) as response:
                    location = _location(response)
                    if location is None:
                        return await self._read(response, budget)
                url = check_url(join_url(url, location), self._domains)
        raise BadRequest(
            f"the image URL is redirected more than {MAX_REDIRECTS} times", code="image_url_rejected"
        )

    @asynccontextmanager
    async def _get(self, url: httpx.URL) -> AsyncIterator[httpcore.Response]:
        """The response, open until its body has been read. Turns the errors of httpcore into `ApiError`."""
        seconds = self._limits.timeout_s
        target = httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=PORTS[url.scheme], target=url.raw_path
        )
        headers = [
            (b"Host", url.netloc),
            (b"User-Agent", b"vision-sidecar"),
            (b"Accept", b"image/*"),
            (b"Accept-Encoding", b"identity"),
        ]
        extensions = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), seconds)}
        try:
            async with self._pool.stream("GET", target, headers=headers, extensions=extensions) as response:
                yield response
        except AddressRefused:
            raise url_refused() from None
        except httpcore.TimeoutException:
            raise _too_slow(self._limits) from None
        except (httpcore.NetworkError, httpcore.ProtocolError):
            raise UpstreamFailed("the image URL could not be fetched: its server failed") from None

    async def _read(self, response: httpcore.Response, budget: _RequestBudget) -> bytes:
        """Reads the body. Raises `ApiError` for another status than 200 or an unusable body."""
        _check_status(response.status)
        headers = httpx.Headers(response.headers)
        if headers.get("content-encoding", "identity").lower() not in ("", "identity"):
            raise UpstreamFailed("the server of the image URL sent a compressed body, which is not accepted")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._limits.max_image_bytes:
            raise _image_too_large(self._limits)
        chunks: list[bytes] = []
        num_bytes = 0
        async for chunk in response.aiter_stream():
            num_bytes += len(chunk)
            if num_bytes > self._limits.max_image_bytes:
                raise _image_too_large(self._limits)
            budget.add(len(chunk))
            chunks.append(chunk)
            await asyncio.sleep(0)  # one read from the socket may hold ten thousand tiny chunks
        if not num_bytes:
            raise BadRequest("the image is empty", code="empty_input")
        return b"".join(chunks)


def make_fetcher(
    settings: Settings,
    *,
    resolve: Resolve | None = None,
    dialler: httpcore.AsyncNetworkBackend | None = None,
) -> Fetcher:
    """The fetcher for these settings. `resolve` and `dialler` stand in for those of the system."""
    limits = FetchLimits(
        max_image_bytes=settings.max_image_bytes,
        max_bytes=settings.max_body_bytes,
        timeout_s=settings.media_timeout_s,
    )
    backend = CheckingBackend(
        resolve or SystemResolver(), settings.allowed_media_networks, dialler or httpcore.AnyIOBackend()
    )
    return Fetcher(settings.allowed_media_domains, limits, backend)


def _raise_first(tasks: Mapping[int, asyncio.Task[bytes]], limits: FetchLimits) -> None:
    """Raises the error of the first image that failed, or a timeout if none failed and one is not done."""
    for index, task in tasks.items():
        error = task.exception() if task.done() else None
        if isinstance(error, ApiError):
            error.param = image_param(index)
        if error is not None:
            try:
                raise error
            finally:
                del error, task  # the traceback of the error refers to this frame
    for index, task in tasks.items():
        if not task.done():
            raise _too_slow(limits, image_param(index))


def _location(response: httpcore.Response) -> str | None:
    """The target of a redirect, or None if the response is not a redirect."""
    if response.status not in _REDIRECTS:
        return None
    headers = httpx.Headers(response.headers)
    if "location" not in headers:
        raise UpstreamFailed("the image URL is redirected, but the redirect has no Location")
    return headers["location"]


def _check_status(status: int) -> None:
    if status == 200:
        return
    message = f"the server of the image URL answered {status}"
    if 400 <= status < 500:
        raise BadRequest(message, code="image_url_rejected")
    raise UpstreamFailed(message)


def _too_slow(limits: FetchLimits, param: str | None = None) -> UpstreamTimeout:
    return UpstreamTimeout(
        f"the image did not arrive from its URL within {limits.timeout_s:g} s", param=param
    )


def _image_too_large(limits: FetchLimits) -> TooLarge:
    return TooLarge(
        f"the image has more than the {limits.max_image_bytes} bytes allowed", code="image_too_large"
    )

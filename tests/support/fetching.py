"""A fetcher, and servers of images that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from service.config.settings import Settings
from service.errors import ApiError
from service.fetching.fetcher import make_fetcher
from service.fetching.image_urls import ImageUrl
from tests.support.upstream import HOST, Resolver, Script, Upstream


def allowing(**changes: object) -> Settings:
    """Settings that allow fetching from this machine, under the host name that the tests give it."""
    defaults = {
        "allowed_media_domains": [HOST, "other.test"],
        "allowed_media_networks": ["127.0.0.0/8"],
        "decode_threads": 2,
    }
    return Settings.model_validate(defaults | changes)


class Run:
    """One call of the fetcher, with a server that has these answers. A string in `images` is a path on it."""

    def __init__(
        self, answers: Mapping[str, bytes | Script], images: Sequence[str | bytes], **changes: object
    ) -> None:
        self.upstream = Upstream(answers)
        self.images: list[bytes] = []
        self.error: ApiError | None = None
        items = [ImageUrl(f"http://{HOST}{x}") if isinstance(x, str) else x for x in images]
        asyncio.run(self._fetch(items, allowing(**changes)))

    async def _fetch(self, items: Sequence[bytes | ImageUrl], settings: Settings) -> None:
        async with self.upstream:
            resolver = Resolver({}, default=["127.0.0.1"])
            resolver.port = self.upstream.port
            fetcher = make_fetcher(settings, resolve=resolver)
            before = asyncio.all_tasks()
            try:
                self.images = await fetcher.fetch(items)
            except ApiError as error:
                self.error = error
            serving = {task for task in asyncio.all_tasks() if "_serve" in repr(task)}
            assert asyncio.all_tasks() - serving == before, "the fetch left a task behind"
            await fetcher.aclose()

    @property
    def refusal(self) -> tuple[int, str, str | None]:
        assert self.error is not None
        return self.error.status, self.error.code, self.error.param

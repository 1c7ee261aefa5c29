"""Chromium, a server with the demo model, and photographs, for the tests of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.support.chromium import CHROMIUM
from tests.support.process import Process

TIMEOUT_MS = 20_000


@pytest.fixture(scope="module")  # while it runs, asyncio believes that this thread has a running loop
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed; Debian has it as `chromium`")
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        # As root in a container, Chromium has no sandbox of its own.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server() -> Iterator[Process]:
    process = Process("--port", "0", "--device", "cpu").ready()
    yield process
    process.kill()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a page of a server, which `prepare` may prepare before.

    At the end there must be no error in the console, and no request to another host.
    """
    faults: list[str] = []
    pages: list[Page] = []

    def listen(message: ConsoleMessage) -> None:
        # Chromium itself says that of every answer that is an error.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            faults.append(message.text)

    def open_(url: str, prepare: Callable[[Page], object] = lambda page: None, width: int = 1280) -> Page:
        page = browser.new_page(viewport={"width": width, "height": 900})
        pages.append(page)
        page.set_default_timeout(TIMEOUT_MS)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", listen)
        origin = "/".join(url.split("/")[:3])
        page.on(
            "request",
            lambda sent: None if sent.url.startswith((origin, f"blob:{origin}")) else faults.append(sent.url),
        )
        prepare(page)
        page.goto(url)
        return page

    yield open_
    for page in pages:
        page.close()
    assert faults == []


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A landscape of 576 × 384, and a portrait of 384 × 576 that is only upright by its EXIF orientation.

    Upright, the portrait has a red area in its upper right corner, over 4 × 4 tokens.
    """
    folder = tmp_path_factory.mktemp("photos")
    landscape, portrait = folder / "land scape.png", folder / "portrait.jpg"
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 256, (6, 9, 3), dtype=np.uint8)) for _ in range(2)]
    pictures[0].resize((576, 384)).save(landscape)
    upright = pictures[1].resize((384, 576))
    upright.paste((255, 0, 0), (256, 0, 384, 128))
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn to the right
    upright.rotate(90, expand=True).save(portrait, exif=exif, quality=95)
    return [landscape, portrait]

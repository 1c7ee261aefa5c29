"""Makes the README's picture of the page: `python -m tests.page.picture`. Needs Chromium."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import skimage.data
from PIL import Image
from playwright.sync_api import expect, sync_playwright

from tests.support.chromium import CHROMIUM
from tests.support.process import Process
from tests.support.project import ROOT

PHOTOS: dict[str, Callable[[], Any]] = {
    "astronaut": skimage.data.astronaut,
    "cat": skimage.data.chelsea,
    "coffee": skimage.data.coffee,
}
WIDTH, HEIGHT = 1180, 1330
MAX_BYTES = 300_000


def make(url: str, folder: Path, target: Path) -> None:
    for name, photo in PHOTOS.items():
        Image.fromarray(photo()).save(folder / f"{name}.jpg", quality=90)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(url)
        page.set_input_files("#files", [folder / f"{name}.jpg" for name in PHOTOS])
        expect(page.locator("#images li[aria-busy=false]")).to_have_count(len(PHOTOS))
        page.locator(".map").first.click(position={"x": 150, "y": 70})
        expect(page.locator("#pointed")).to_contain_text("astronaut")
        page.wait_for_timeout(4500)  # until the panel has read the metrics twice
        page.screenshot(path=target)
        browser.close()
    # Fewer colours keep the file small.
    Image.open(target).convert("RGB").quantize(256).save(target, optimize=True)
    assert target.stat().st_size < MAX_BYTES, "the picture is too large for the README"


if __name__ == "__main__":
    server = Process("--port", "0", "--device", "cpu").ready()
    try:
        with tempfile.TemporaryDirectory() as photos:
            make(server.url, Path(photos), ROOT / "docs/page.png")
    finally:
        server.kill()

"""Makes the README's picture of the page: `python -m tests.page.picture`. Needs Chromium."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import skimage.data
from PIL import Image
from playwright.sync_api import expect, sync_playwright

from tests.support.process import Process
from tests.support.project import ROOT

PHOTOS: dict[str, Callable[[], Any]] = {
    "astronaut": skimage.data.astronaut,
    "cat": skimage.data.chelsea,
    "coffee": skimage.data.coffee,
}


def make(url: str, folder: Path, target: Path) -> None:
    for name, photo in PHOTOS.items():
        Image.fromarray(photo()).save(folder / f"{name}.jpg", quality=90)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1180, "height": 900})
        page.goto(url)
        page.set_input_files("#files", [str(folder / f"{name}.jpg") for name in PHOTOS])
        expect(page.locator(".map")).to_have_count(len(PHOTOS))
        page.locator(".map").first.click(position={"x": 130, "y": 75})
        page.locator("#map-section").scroll_into_view_if_needed()
        expect(page.locator("#pointed")).to_contain_text("astronaut")
        page.evaluate("() => window.scrollTo(0, 0)")
        page.wait_for_timeout(500)
        page.screenshot(path=target, clip={"x": 0, "y": 0, "width": 1180, "height": 1040}, full_page=True)
        browser.close()
    # So many colours are enough, and keep the file small.
    Image.open(target).convert("P", palette=Image.Palette.ADAPTIVE, colors=256).save(target, optimize=True)


if __name__ == "__main__":
    server = Process("--port", "0", "--device", "cpu").ready()
    try:
        with tempfile.TemporaryDirectory() as photos:
            make(server.url, Path(photos), ROOT / "docs/page.png")
    finally:
        server.kill()

"""The page in a real browser: Chromium, if it is installed (Debian: `apt-get install chromium`)."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.process import Process

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
TIMEOUT_MS = 20_000

Open = Callable[[str], Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # As root in a container, Chromium has no sandbox of its own.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    process = Process("--port", "0", "--device", "cpu").ready()
    yield process
    process.kill()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens the page of a server. At the end there must be no error, and no request to another host."""
    faults: list[str] = []
    pages: list[Page] = []

    def open_(url: str) -> Page:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(TIMEOUT_MS)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "console",
            # Chromium itself says this of every refused request.
            lambda message: (
                faults.append(message.text)
                if message.type in ("error", "warning") and "Failed to load resource" not in message.text
                else None
            ),
        )
        page.on("request", lambda sent: None if _is_local(sent.url, url) else faults.append(sent.url))
        page.goto(url)
        pages.append(page)
        return page

    yield open_
    for page in pages:
        page.close()
    assert faults == []


def _is_local(asked: str, url: str) -> bool:
    return asked.startswith((url, "blob:", "data:"))


@pytest.fixture
def photos(tmp_path: Path) -> list[str]:
    """A landscape, and a portrait that its EXIF orientation turns upright."""
    landscape, portrait = tmp_path / "landscape.png", tmp_path / "portrait.jpg"
    rng = np.random.default_rng(0)
    for path, orientation in ((landscape, 1), (portrait, 6)):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 9, 3), dtype=np.uint8))
        exif = Image.Exif()
        exif[0x0112] = orientation
        coarse.resize((576, 384)).save(path, exif=exif)
    return [str(landscape), str(portrait)]


def choose(page: Page, *files: str) -> None:
    page.set_input_files("#files", list(files))


def test_images_are_shown_with_their_facts_and_compared(
    open_page: Open, server: Process, photos: list[str]
) -> None:
    page = open_page(server.url)
    expect(page.locator("#demo")).to_be_visible()
    choose(page, *photos)
    cards = page.locator("#images li")
    expect(cards).to_have_count(2)
    expect(cards.nth(0)).to_contain_text("576 × 384")
    expect(cards.nth(0)).to_contain_text("216 tokens (18 × 12)")
    expect(cards.nth(1)).to_contain_text("384 × 576")
    expect(cards.nth(1)).to_contain_text("216 tokens (12 × 18)")
    expect(cards.nth(0)).to_contain_text("encode")
    expect(cards.nth(0)).to_contain_text("run eagerly: no graphs")
    cells = page.locator("#matrix tbody td")
    numbers = [float(text) for text in cells.all_inner_texts()]
    assert numbers[0] == numbers[3] == 1
    assert numbers[1] == numbers[2] < 1
    expect(page.locator("#matrix th").nth(0)).to_have_text("landscape.png")


def test_clicked_token_is_most_similar_to_itself_and_the_map_fits_the_image(
    open_page: Open, server: Process, photos: list[str]
) -> None:
    page = open_page(server.url)
    choose(page, *photos)
    maps = page.locator(".map")
    expect(maps).to_have_count(2)
    portrait = maps.nth(1)
    portrait.scroll_into_view_if_needed()
    box = portrait.locator("img").bounding_box()
    over = portrait.locator("canvas").bounding_box()
    assert box is not None
    assert over is not None
    for side in ("x", "y", "width", "height"):
        assert over[side] == pytest.approx(box[side], abs=1)
    assert box["height"] / box["width"] == pytest.approx(576 / 384, rel=0.02)
    assert [portrait.locator("canvas").get_attribute(name) for name in ("width", "height")] == ["12", "18"]
    portrait.click(position={"x": box["width"] * 2.5 / 12, "y": box["height"] * 16.5 / 18})
    pointed = page.locator("#pointed")
    expect(pointed).to_have_text("portrait.jpg, column 3, row 17")
    expect(pointed).to_have_attribute("data-similarity", "1.0000")
    portrait.hover(position={"x": 5, "y": 5})  # the place is held
    expect(pointed).to_have_text("portrait.jpg, column 3, row 17")
    page.select_option("#level", "2")
    expect(pointed).to_have_attribute("data-similarity", "1.0000")


def test_map_works_with_the_keyboard(open_page: Open, server: Process, photos: list[str]) -> None:
    page = open_page(server.url)
    choose(page, photos[0])
    picture = page.locator(".map").first
    expect(picture).to_have_attribute("aria-label", "landscape.png: 18 by 12 tokens")
    picture.focus()
    for key in ("ArrowDown", *["ArrowLeft"] * 30):
        page.keyboard.press(key)
    expect(page.locator("#pointed")).to_contain_text("column 1,")


def test_refused_file_is_explained_in_the_service_s_words(
    open_page: Open, server: Process, photos: list[str], tmp_path: Path
) -> None:
    bad = tmp_path / "notes.jpg"
    bad.write_text("no image")
    page = open_page(server.url)
    choose(page, str(bad), photos[0])
    expect(page.locator("#errors li")).to_contain_text("notes.jpg: not an image; the formats served are JPEG")
    expect(page.locator("#images li")).to_have_count(1)


def test_image_is_dropped_and_removed_and_its_request_shown(open_page: Open, server: Process) -> None:
    page = open_page(server.url)
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "PNG")
    transfer = page.evaluate_handle(
        "(bytes) => { const t = new DataTransfer();"
        " t.items.add(new File([new Uint8Array(bytes)], 'it\\'s.png', {type: 'image/png'})); return t; }",
        list(file.getvalue()),
    )
    page.dispatch_event("#drop", "drop", {"dataTransfer": transfer})
    expect(page.locator("#images li strong")).to_have_text("it's.png")
    code = page.locator("#snippet")
    expect(code).to_contain_text(f"{server.url}/embed?pooling=none")
    expect(code).to_contain_text(r"@'it'\''s.png'")
    page.get_by_role("button", name="OpenAI client").click()
    expect(code).to_contain_text(f'base_url="{server.url}/v1"')
    page.get_by_role("button", name="Remove it's.png").click()
    expect(page.locator("#map-section")).to_be_hidden()


def test_key_is_asked_for_and_not_kept(open_page: Open, photos: list[str]) -> None:
    process = Process("--port", "0", "--device", "cpu", "--api-keys", "secret").ready()
    try:
        page = open_page(process.url)
        expect(page.locator("#key")).to_be_visible()
        choose(page, photos[0])
        for text in ("wrong", "secret"):
            page.get_by_label("API key").fill(text)
            page.get_by_role("button", name="Use").click()
        expect(page.locator("#images li")).to_have_count(1)
        expect(page.locator("#snippet")).to_contain_text("$API_KEY")
        stored = page.evaluate("() => JSON.stringify([localStorage, sessionStorage, document.cookie])")
        assert "secret" not in stored
    finally:
        process.kill()

"""Images on the page, in Chromium: their facts, the matrix, and the map of their tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from playwright.sync_api import Page, expect
from safetensors.torch import load

from tests.support.process import Process

Open = Callable[..., Page]
COLUMNS, ROWS = 12, 18  # of the portrait
HIDDEN_SIZE = 128  # of the demo model


def choose(page: Page, *files: Path) -> None:
    page.set_input_files("#files", list(files))
    expect(page.locator("#images li[aria-busy=false]")).to_have_count(len(files))


def embeddings(url: str, photo: Path, **options: str) -> torch.Tensor:
    """The service's own answer."""
    answer = httpx.post(
        f"{url}/embed",
        params={"format": "safetensors", **options},
        content=photo.read_bytes(),
        headers={"content-type": "application/octet-stream"},
    )
    return load(answer.raise_for_status().content)["embeddings"]


def similarities(url: str, photo: Path, level: int, target: torch.Tensor) -> torch.Tensor:
    """The cosine similarity of each of its tokens with the target: [tokens]."""
    return torch.cosine_similarity(tokens(url, photo, level), target[None])


def tokens(url: str, photo: Path, level: int) -> torch.Tensor:
    """The columns of a level: 0 is the main one."""
    rows = embeddings(url, photo, pooling="none", deepstack="true")
    return rows[:, level * HIDDEN_SIZE :][:, :HIDDEN_SIZE]


def point(page: Page, row: int, column: int, *, click: bool = False) -> None:
    """Points at a token of the portrait, counted from 0."""
    portrait = page.get_by_role("application", name="Map of portrait.jpg")
    portrait.scroll_into_view_if_needed()
    box = portrait.bounding_box()
    assert box is not None
    x, y = (column + 0.5) / COLUMNS * box["width"], (row + 0.5) / ROWS * box["height"]
    (portrait.click if click else portrait.hover)(position={"x": x, "y": y})


def test_images_have_their_facts(open_page: Open, server: Process, photos: list[Path]) -> None:
    page = open_page(server.url)
    expect(page.locator("#demo")).to_contain_text("vectors mean nothing")
    choose(page, *photos)
    for item, size in zip(page.locator("#images li").all(), ["576 × 384", "384 × 576"], strict=True):
        expect(item).to_contain_text(size)
        expect(item).to_contain_text("216 tokens")
        for stage in ("read", "decode", "queue", "encode", "serialize", "total"):
            expect(item.locator(f".stages .{stage}")).to_have_text(re.compile(rf"^{stage} \d+\.\d( ms)?$"))
        expect(item).to_contain_text("ran eagerly: this server has no CUDA graphs")
    expect(page.locator("#status")).to_have_text("2 embedded.")


def test_matrix_has_the_similarities_of_the_vectors(
    open_page: Open, server: Process, photos: list[Path]
) -> None:
    page = open_page(server.url)
    choose(page, *photos)
    cells = page.locator("#matrix tbody td")
    expect(cells).to_have_count(4)
    shown = [float(text) for text in cells.all_inner_texts()]
    vectors = torch.stack([embeddings(server.url, photo)[0] for photo in photos])
    assert shown == pytest.approx((vectors @ vectors.T).flatten().tolist(), abs=6e-4)
    assert shown[1] < 0.999
    colours = [cell.evaluate("cell => getComputedStyle(cell).backgroundColor") for cell in cells.all()]
    assert colours[0] == colours[3] != colours[1] == colours[2]
    expect(page.locator("#matrix th[scope=row]")).to_have_text(["land scape.png", "portrait.jpg"])


def test_map_lies_on_an_image_as_it_is_seen(open_page: Open, server: Process, photos: list[Path]) -> None:
    page = open_page(server.url)
    choose(page, *photos)
    point(page, 16, 2, click=True)
    expect(page.locator("#pointed")).to_contain_text("portrait.jpg, row 17, column 3.")
    expect(page.locator("#pointed")).to_have_attribute("data-self", "1.0000")
    portrait = page.get_by_role("application", name="Map of portrait.jpg, 18 rows and 12 columns of tokens")
    parts = {name: portrait.locator(name).bounding_box() for name in ("img", "canvas", ".chosen")}
    assert None not in parts.values()
    box, over, mark = (part for part in parts.values() if part)
    assert box == pytest.approx(over)
    assert box["height"] / box["width"] == pytest.approx(576 / 384, rel=0.01)
    assert [portrait.locator("canvas").get_attribute(name) for name in ("width", "height")] == ["12", "18"]
    assert mark["x"] - box["x"] == pytest.approx(box["width"] * 2 / COLUMNS, abs=0.5)
    assert mark["y"] - box["y"] == pytest.approx(box["height"] * 16 / ROWS, abs=0.5)
    assert mark["height"] == pytest.approx(box["height"] / ROWS, abs=0.5)


def test_tokens_are_where_their_part_of_the_image_is(
    open_page: Open, server: Process, photos: list[Path]
) -> None:
    page = open_page(server.url)
    choose(page, photos[1])
    point(page, 1, COLUMNS - 2, click=True)
    expect(page.locator("#pointed")).to_contain_text(f"row 2, column {COLUMNS - 1}.")
    pixels = page.locator(".map canvas").evaluate(
        "canvas => Array.from(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data)"
    )
    green = torch.tensor(pixels, dtype=torch.float32).reshape(ROWS, COLUMNS, 4)[
        ..., 1
    ]  # grows with similarity
    is_red = torch.zeros(ROWS, COLUMNS, dtype=torch.bool)
    is_red[:4, -4:] = True
    assert green[is_red].mean() > green[~is_red].mean() + 40


@pytest.mark.parametrize("level", [0, 2])
def test_most_alike_tokens_are_those_of_the_service_s_tokens(
    level: int, open_page: Open, server: Process, photos: list[Path]
) -> None:
    page = open_page(server.url)
    choose(page, *photos)
    point(page, 9, 5, click=True)
    page.select_option("#level", str(level))
    token = 9 * COLUMNS + 5
    target = tokens(server.url, photos[1], level)[token]
    texts = []
    for photo, columns in zip(photos, (18, 12), strict=True):
        found = similarities(server.url, photo, level, target)
        if photo == photos[1]:
            found[token] = -1
        best = int(found.argmax())
        texts.append(
            f"{photo.name}, row {best // columns + 1}, column {best % columns + 1}: {found[best]:.3f}"
        )
    expect(page.locator("#pointed")).to_have_text(
        f"portrait.jpg, row 10, column 6. Most alike: {'; '.join(texts)}."
    )
    expect(page.locator("#pointed")).to_have_attribute("data-self", "1.0000")


def test_one_request_an_image_brings_its_tokens_and_one_more_its_deepstack(
    open_page: Open, server: Process, photos: list[Path]
) -> None:
    sent: list[str] = []
    page = open_page(
        server.url,
        lambda page: page.on("request", lambda request: sent.append(request.url.partition("/embed?")[2])),
    )
    choose(page, *photos)
    point(page, 3, 3)
    main = "pooling=none&format=safetensors&dtype=float32"
    assert [query for query in sent if query] == [main] * 2
    for level in ("1", "2", "0"):
        page.select_option("#level", level)
        expect(page.locator("#images li[aria-busy=false] .how:has-text('ran')")).to_have_count(2)
    assert [query for query in sent if query] == [main] * 2 + [f"{main}&deepstack=true"] * 2


def test_map_follows_the_pointer_and_returns_to_the_kept_place(
    open_page: Open, server: Process, photos: list[Path]
) -> None:
    page = open_page(server.url)
    choose(page, *photos)
    overlay = page.locator(".map canvas").first
    expect(overlay).to_be_hidden()
    pointed = page.locator("#pointed")
    point(page, 0, 0, click=True)
    expect(pointed).to_contain_text("portrait.jpg, row 1, column 1.")
    before = overlay.evaluate("canvas => canvas.toDataURL()")
    point(page, 12, 7)
    expect(pointed).to_contain_text("portrait.jpg, row 13, column 8.")
    assert overlay.evaluate("canvas => canvas.toDataURL()") != before
    page.mouse.move(1, 1)
    expect(pointed).to_contain_text("portrait.jpg, row 1, column 1.")
    point(page, 0, 0, click=True)  # lets it go
    page.mouse.move(1, 1)
    expect(pointed).to_have_text("")
    expect(overlay).to_be_hidden()
    page.locator("#opacity").fill("20")
    assert overlay.evaluate("canvas => getComputedStyle(canvas).opacity") == "0.2"


def test_map_works_with_keys_and_says_what_it_finds(
    open_page: Open, server: Process, photos: list[Path]
) -> None:
    page = open_page(server.url)
    choose(page, photos[1])
    said = page.locator("#said")
    page.get_by_role("application").focus()
    for key in ("ArrowDown", *["ArrowLeft"] * 20):
        page.keyboard.press(key)
    expect(said).to_contain_text("portrait.jpg, row 11, column 1. Most alike: portrait.jpg")
    page.keyboard.press("Enter")
    page.locator("#opacity").focus()
    expect(page.locator("#pointed")).to_contain_text("portrait.jpg, row 11, column 1.")
    page.get_by_role("application").focus()
    page.keyboard.press("Escape")
    expect(said).to_have_text("No place is kept.")
    expect(page.locator("#pointed")).to_have_text("")


def test_page_fits_a_phone_and_has_a_dark_side(open_page: Open, server: Process, photos: list[Path]) -> None:
    page = open_page(server.url, width=360)
    choose(page, *photos)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    colours = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme="light" if scheme == "light" else "dark")
        colours.append(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
    assert colours == ["rgb(244, 244, 248)", "rgb(18, 17, 26)"]

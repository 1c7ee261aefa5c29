"""What the page asks a server for, in Chromium: refusals, keys, retries, counters, requests as code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from tests.support.process import Process

Open = Callable[..., Page]
KEY = "sk-secret"


@pytest.fixture(scope="module")
def locked() -> Iterator[Process]:
    """A server that needs a key."""
    process = Process("--port", "0", "--device", "cpu", "--api-keys", KEY).ready()
    yield process
    process.kill()


def choose(page: Page, *files: Path) -> None:
    page.set_input_files("#files", list(files))


def give_key(page: Page, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Use this key").click()


def test_refused_file_is_explained_in_the_service_s_words(
    open_page: Open, server: Process, photos: list[Path], tmp_path: Path
) -> None:
    bad = tmp_path / "notes.jpg"
    bad.write_text("no image")
    page = open_page(server.url)
    choose(page, bad, photos[0])
    answer = httpx.post(f"{server.url}/embed", content=b"no image", headers={"content-type": "image/jpeg"})
    items = page.locator("#images li")
    expect(items.first.get_by_role("alert")).to_have_text(answer.json()["error"]["message"])
    expect(items.nth(1)).to_contain_text("216 tokens")
    expect(page.locator("#status")).to_have_text("1 embedded, 1 not.")
    expect(page.locator("#matrix tbody td")).to_have_count(1)


@pytest.mark.parametrize("event", ["drop", "paste"])
def test_image_is_dropped_or_pasted_and_removed(
    event: str, open_page: Open, server: Process, photos: list[Path]
) -> None:
    page = open_page(server.url)
    page.evaluate(
        """([event, bytes]) => {
            const files = new DataTransfer();
            files.items.add(new File([new Uint8Array(bytes)], "it's.png", {type: "image/png"}));
            const made = event === "drop"
                ? new DragEvent("drop", {dataTransfer: files, bubbles: true, cancelable: true})
                : new ClipboardEvent("paste", {clipboardData: files, bubbles: true});
            document.body.dispatchEvent(made);
        }""",
        [event, list(photos[0].read_bytes())],
    )
    expect(page.locator("#images h3")).to_have_text("it's.png")
    expect(page.locator("#snippet")).to_contain_text(r"'it'\''s.png'")
    page.get_by_role("button", name="Remove it's.png").click()
    expect(page.locator("#images li")).to_have_count(0)
    for section in ("#matrix-section", "#request-section", "#map-controls"):
        expect(page.locator(section)).to_be_hidden()


def test_key_is_asked_for_and_kept_in_memory_only(
    open_page: Open, locked: Process, photos: list[Path]
) -> None:
    page = open_page(locked.url)
    form = page.locator("#key")
    expect(form).to_contain_text("this server needs an API key")
    choose(page, photos[0])
    for key, words in (("sk-other", "not one of this server's"), ("schlüssel\u2603", "ASCII")):
        give_key(page, key)
        expect(form).to_contain_text(words)
    give_key(page, KEY)
    expect(page.locator("#images li")).to_contain_text("216 tokens")
    expect(form).to_be_hidden()
    stored = page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])")
    assert "sk-" not in stored
    assert KEY not in page.content()
    page.reload()
    expect(form).to_contain_text("this server needs an API key")


def numbers_of(printed: str) -> list[float]:
    """The vector that a program printed: a list, rows of an array, or an answer of the service."""
    if printed.startswith("{"):
        found: list[float] = json.loads(printed)["data"][0]["embedding"]
        return found
    return [float(word) for word in printed.replace("[", " ").replace("]", " ").replace(",", " ").split()]


@pytest.mark.parametrize(
    ("language", "format_"),
    [("curl", "json"), ("Python", "json"), ("Python", "npy"), ("OpenAI client", "json")],
)
def test_request_as_code_runs_as_it_stands(
    language: str, format_: str, open_page: Open, locked: Process, photos: list[Path]
) -> None:
    page = open_page(locked.url)
    give_key(page, KEY)
    choose(page, *photos)
    expect(page.locator("#request-image option")).to_have_count(2)
    page.select_option("#request-image", label="land scape.png")
    page.get_by_label("Format").select_option(format_)
    page.get_by_role("button", name=language).click()
    code = page.locator("#snippet").inner_text()
    command = ["sh", "-c", code] if language == "curl" else [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        command, cwd=photos[0].parent, capture_output=True, text=True, timeout=60,
        env={**os.environ, "API_KEY": KEY},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = httpx.post(
        f"{locked.url}/embed", content=photos[0].read_bytes(),
        headers={"authorization": f"Bearer {KEY}", "content-type": "image/png"},
    )  # fmt: skip
    assert numbers_of(done.stdout) == pytest.approx(answer.json()["data"][0]["embedding"], abs=1e-6)


def test_answer_and_format_are_in_the_code(open_page: Open, server: Process, photos: list[Path]) -> None:
    page = open_page(server.url)
    choose(page, photos[1])
    code = page.locator("#snippet")
    expect(code).to_contain_text("@portrait.jpg")
    page.get_by_label("Answer").select_option("deepstack")
    page.get_by_label("Format").select_option("safetensors")
    expect(code).to_contain_text(f"'{server.url}/embed?pooling=none&deepstack=true&format=safetensors'")
    expect(code).not_to_contain_text("API_KEY")
    page.get_by_role("button", name="Python").click()
    expect(code).to_contain_text('params={"pooling": "none", "deepstack": "true", "format": "safetensors"}')
    page.get_by_role("button", name="Copy").click()
    expect(page.locator("#copied")).to_contain_text(".")


def once(status: int, message: str) -> Callable[[Route], None]:
    """Answers the first request with an error, and lets all others pass."""
    left = [status]

    def handle(route: Route) -> None:
        if not left:
            return route.continue_()
        body = json.dumps({"error": {"message": message}})
        return route.fulfill(status=left.pop(), body=body, headers={"retry-after": "1"})

    return handle


def test_page_waits_for_the_model(open_page: Open, server: Process, photos: list[Path]) -> None:
    page = open_page(server.url, lambda page: page.route("**/info", once(503, "the model is loading")))
    expect(page.locator("#model")).to_have_text("the model is loading")
    choose(page, photos[0])
    expect(page.locator("#images li")).to_contain_text("216 tokens")
    expect(page.locator("#model")).to_contain_text("demo")


def test_refused_image_can_be_tried_again(open_page: Open, server: Process, photos: list[Path]) -> None:
    page = open_page(server.url, lambda page: page.route("**/embed?*", once(429, "the queue is full")))
    choose(page, photos[0])
    expect(page.locator("#images").get_by_role("alert")).to_have_text("the queue is full")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("#images li")).to_contain_text("216 tokens")
    expect(page.locator("#images .error")).to_be_hidden()


@pytest.mark.parametrize(
    ("hits", "misses", "words"),
    [
        (1, 0, "ran by replay of a CUDA graph"),
        (0, 1, "ran eagerly: no CUDA graph took it"),
        (2, 1, "the server's counters do not tell"),
        (0, 0, "the server's counters do not tell"),
    ],
)
def test_counters_tell_how_an_image_ran(
    hits: int, misses: int, words: str, open_page: Open, server: Process, photos: list[Path]
) -> None:
    """The server has graphs, and its counters grow by `hits` and `misses` with each request."""
    info = httpx.get(f"{server.url}/info").json()
    info["encoder_cudagraph"]["enabled"] = True
    counts = [0, 0]

    def embed(route: Route) -> None:
        counts[:] = counts[0] + hits, counts[1] + misses
        route.continue_()

    def metrics(route: Route) -> None:
        names = (
            "vision_sidecar_encoder_cudagraph_hits_total",
            "vision_sidecar_encoder_cudagraph_misses_total",
        )
        lines = [f'{name}{{device="x"}} {count}.0' for name, count in zip(names, counts, strict=True)]
        others = ("images", "image_tokens", "encoder_padding_tokens", "cache_hits", "cache_misses")
        lines += [f"vision_sidecar_{name}_total 1.0" for name in others]
        lines += [f"vision_sidecar_queue_{name} 0.0" for name in ("images", "tokens", "limit_tokens")]
        route.fulfill(body="\n".join(lines) + "\n")

    def prepare(page: Page) -> None:
        page.route("**/info", lambda route: route.fulfill(json=info))
        page.route("**/embed?*", embed)
        page.route("**/metrics", metrics)

    page = open_page(server.url, prepare)
    choose(page, photos[0])
    expect(page.locator("#images .how")).to_contain_text(words)


def test_panel_shows_the_server_s_metrics(open_page: Open, server: Process, photos: list[Path]) -> None:
    page = open_page(server.url)
    choose(page, photos[0])
    expect(page.locator("#images li")).to_contain_text("216 tokens")
    text = httpx.get(f"{server.url}/metrics").text
    [line] = [line for line in text.splitlines() if line.startswith("vision_sidecar_images_total ")]
    panel = page.locator("#panel")
    expect(panel).to_contain_text(f"{float(line.split()[1]):.0f} in all")
    expect(panel).to_contain_text(f"0 / {float(line.split()[1]):.0f}images by replay / eagerly")
    expect(panel).to_contain_text("0 of 131,072 tokens")


def test_page_works_behind_a_proxy_that_strips_a_prefix(
    open_page: Open, server: Process, photos: list[Path]
) -> None:
    stray: list[str] = []

    def proxy(route: Route) -> None:
        if "/team/images/" not in route.request.url:
            stray.append(route.request.url)
        route.fulfill(response=route.fetch(url=route.request.url.replace("/team/images/", "/")))

    page = open_page(f"{server.url}/team/images/", lambda page: page.route(f"{server.url}/**", proxy))
    choose(page, photos[0])
    expect(page.locator("#images li")).to_contain_text("216 tokens")
    expect(page.locator("#matrix tbody td")).to_have_text("1.000")
    expect(page.locator("#snippet")).to_contain_text(f"{server.url}/team/images/embed")
    assert stray == []

"""The page and its files, as the server sends them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch

import pytest

from service.config.settings import Settings
from service.page.page import PATHS
from tests.support.answers import error_of
from tests.support.app import Service, only
from tests.support.project import ROOT

Serve = Callable[..., Service]
STATIC = ROOT / "service/page/static"
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def test_every_file_has_a_path_and_is_in_the_wheel() -> None:
    names = {file.name for file in STATIC.iterdir()}
    assert {"/", *(f"/page/{name}" for name in names - {"index.html"})} == {*PATHS}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    [pattern] = project["tool"]["setuptools"]["package-data"]["service.page"]
    assert all(fnmatch(f"static/{name}", pattern) for name in names)


@pytest.mark.parametrize("path", PATHS)
def test_file_is_sent_with_its_type_and_a_strict_policy(path: str, service: Service) -> None:
    response = service.get(path)
    name = path.rpartition("/")[2] or "index.html"
    assert response.content == (STATIC / name).read_bytes()
    assert response.headers["content-type"] == TYPES[name.rpartition(".")[2]]
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "worker-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self' blob:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    head = service.request("HEAD", path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == response.headers["content-length"]
    assert error_of(service.request("POST", path))[0] == 405


@pytest.mark.parametrize("path", PATHS)
def test_files_name_no_other_host_and_no_absolute_path(path: str) -> None:
    text = (STATIC / (path.rpartition("/")[2] or "index.html")).read_text()
    hosts = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text))
    assert hosts <= {"http://www.w3.org"}  # the name of SVG
    assert re.findall(r"""(?:src|href)="/|(?:fetch|ask|from|import|URL)\(? ?["'`]/""", text) == []
    assert re.findall(r"<script>|<style|style=|\bon\w+=\"|innerHTML|eval\(|new Function", text) == []


def test_every_file_that_is_named_is_sent() -> None:
    named = set(re.findall(r'(?:src|href)="(page/[\w.]+)"', (STATIC / "index.html").read_text()))
    for path in PATHS[1:]:
        text = (STATIC / path.rpartition("/")[2]).read_text()
        named |= {f"page/{name}" for name in re.findall(r'"(?:\./)?(\w+\.js)"', text)}
    assert {f"/{name}" for name in named} == {*PATHS[1:]}


@pytest.mark.parametrize(
    "path",
    [
        *("/page", "/page/", "/page/nope.js", "/page/index.html", "/index.html", "/page/static/page.js"),
        *("/page/../page.py", "/page/%2e%2e/page.py", "/page/..%2fpage.py", "/page/%2e%2e%2fpage.py"),
        *("//page/page.js", "/page//page.js", "/page/page.js/", "/page/page.js%00"),
    ],
)
def test_other_files_are_not_found(path: str, service: Service) -> None:
    assert error_of(service.get(f"http://sidecar{path}"))[:2] == (404, "not_found")


def test_page_can_be_turned_off(serve: Serve, settings: Settings) -> None:
    service = serve(only(settings, page=False))
    assert {error_of(service.get(path))[:2] for path in PATHS} == {(404, "not_found")}
    assert 'route="/"' not in service.get("/metrics").text


def test_page_needs_no_key_but_what_it_asks_for_does(serve: Serve, settings: Settings) -> None:
    service = serve(only(settings, api_keys="secret"))
    assert {service.get(path).status_code for path in PATHS} == {200}
    for path in ("/info", "/page/nope.js", "/page/index.html"):
        assert service.get(path).status_code == 401
    assert service.request("POST", "/embed").status_code == 401


def test_all_files_are_counted_together(service: Service) -> None:
    for path in PATHS:
        service.get(path)
    assert service.metric("requests_total", route="/", status="200") == 1
    assert service.metric("requests_total", route="/page/{name}", status="200") == len(PATHS) - 1
    assert service.metric("requests_total", route="other", status="200") == 0

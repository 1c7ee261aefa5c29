"""The page and its files, as the server sends them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from service.config.settings import Settings
from service.page.page import PATHS
from tests.support.app import Service, only

Serve = Callable[..., Service]


@pytest.mark.parametrize("path", PATHS)
def test_file_is_sent_with_its_type_and_a_strict_policy(serve: Serve, path: str) -> None:
    response = serve().get(path)
    assert response.status_code == 200
    kind = {"/": "html", "css": "css", "js": "javascript"}["/" if path == "/" else path.rpartition(".")[2]]
    assert response.headers["content-type"] == f"text/{kind}; charset=utf-8"
    policy = response.headers["content-security-policy"].split("; ")
    assert "default-src 'none'" in policy
    assert {"script-src 'self'", "style-src 'self'", "connect-src 'self'", "worker-src 'self'"} <= {*policy}
    assert "unsafe" not in response.headers["content-security-policy"]


@pytest.mark.parametrize("path", PATHS)
def test_files_name_no_other_host_and_no_absolute_path(serve: Serve, path: str) -> None:
    text = serve().get(path).text
    assert re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text) == []
    assert re.findall(r"""(?:src|href)="/|(?:fetch|ask|from|import)\(? ?["'`]/""", text) == []
    assert re.findall(r"<script>|<style|style=|onclick=|innerHTML|eval\(", text) == []


def test_every_file_that_is_named_is_sent(serve: Serve) -> None:
    service = serve()
    named = {f"/{name}" for name in re.findall(r'(?:src|href)="(page/[\w.]+)"', service.get("/").text)}
    for path in PATHS[1:]:
        named |= {f"/page/{name}" for name in re.findall(r'"(?:\./)?(\w+\.js)"', service.get(path).text)}
    assert named == {*PATHS[1:]}


@pytest.mark.parametrize(
    "path", ["/page", "/page/", "/page/nope.js", "/page/../app.py", "/page/%2e%2e/page.py", "/index.html"]
)
def test_other_files_are_not_found(serve: Serve, path: str) -> None:
    assert serve().get(path).status_code == 404


def test_page_can_be_turned_off(serve: Serve, settings: Settings) -> None:
    service = serve(only(settings, page=False))
    assert {service.get(path).status_code for path in PATHS} == {404}


def test_page_needs_no_key_but_what_it_asks_for_does(serve: Serve, settings: Settings) -> None:
    service = serve(only(settings, api_keys="secret"))
    assert {service.get(path).status_code for path in PATHS} == {200}
    assert service.get("/info").status_code == 401

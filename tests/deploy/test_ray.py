"""What deploy/ray promises and needs no Ray to be seen: its files agree, and the app is told who left.

`make check-ray` runs it.
"""

from __future__ import annotations

import ast
import asyncio
import re
from typing import Any

import pytest
import yaml
from starlette.types import Message, Receive, Scope, Send

from deploy.ray.adapter import BehindServe
from service.config.arguments import parse_settings
from tests.support.project import ROOT

RAY = ROOT / "deploy/ray"
SOURCE = (RAY / "app.py").read_text()
HTTP: Scope = {"type": "http"}


def configuration(name: str) -> Any:
    return yaml.safe_load((RAY / name).read_text())


@pytest.mark.parametrize("name", ["serve.yaml", "demo.yaml"])
def test_a_configuration_names_what_there_is(name: str) -> None:
    config = configuration(name)
    [application] = config["applications"]
    module, _, function = application["import_path"].partition(":")
    path = RAY.parent.parent.joinpath(*module.split(".")).with_suffix(".py")
    assert function in {
        node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    }
    [deployment] = application["deployments"]
    assert f'name="{deployment["name"]}"' in SOURCE
    assert application["route_prefix"] == "/"


@pytest.mark.parametrize("name", ["serve.yaml", "demo.yaml"])
def test_a_configuration_holds_settings_and_lets_them_decide(name: str) -> None:
    config = configuration(name)
    [application] = config["applications"]
    settings = parse_settings([], application["runtime_env"]["env_vars"])
    assert config["http_options"]["request_timeout_s"] > settings.request_timeout_s
    [deployment] = application["deployments"]
    # app.py takes these from the settings, and a configuration would win.
    assert not {"ray_actor_options", "graceful_shutdown_timeout_s", "max_ongoing_requests"} & set(deployment)
    scaling = deployment["autoscaling_config"]
    assert 1 <= scaling["min_replicas"] < scaling["max_replicas"]


def test_prometheus_asks_for_targets_where_the_app_lists_them() -> None:
    [job] = configuration("prometheus.yml")["scrape_configs"]
    assert job["job_name"] == "vision-sidecar"  # which the alerts look for
    [discovery] = job["http_sd_configs"]
    [path] = re.findall(r'^TARGETS_PATH = "(.+)"$', SOURCE, re.MULTILINE)
    port = configuration("serve.yaml")["http_options"]["port"]
    assert discovery["url"].endswith(f":{port}{path}")
    [rules] = configuration("prometheus.yml")["rule_files"]
    assert (RAY / rules).is_file()


class Waiting:
    """An app that receives until the caller leaves, and notes how it ended."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.ended = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while not self.received or self.received[-1] != "http.disconnect":
                self.received.append((await receive())["type"])
            await asyncio.sleep(0)  # what it does to end the request
            self.ended = "by itself"
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("nothing comes")


async def nowhere(message: Message) -> None:
    raise AssertionError("nobody is there")


def test_a_cancelled_request_ends_as_one_whose_caller_left() -> None:
    app = Waiting()

    async def cancel() -> None:
        request = asyncio.create_task(BehindServe(app)(HTTP, never, nowhere))
        await asyncio.sleep(0.01)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request

    asyncio.run(cancel())
    assert (app.received, app.ended) == (["http.disconnect"], "by itself")


def test_what_cannot_be_received_any_more_is_a_caller_who_left() -> None:
    app = Waiting()
    messages: list[Message | Exception] = [{"type": "http.request"}, RuntimeError("the proxy is gone")]

    async def receive() -> Message:
        message = messages.pop(0)
        if isinstance(message, Exception):
            raise message
        return message

    asyncio.run(BehindServe(app)(HTTP, receive, nowhere))
    assert (app.received, app.ended) == (["http.request", "http.disconnect"], "by itself")


def test_the_id_is_left_to_serve_and_all_else_passes() -> None:
    start: Message = {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"x-request-id", b"a"), (b"vary", b"b")],
    }
    body: Message = {"type": "http.response.body", "body": b"c"}
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start)
        await send(body)

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(BehindServe(app)(HTTP, never, send))
    assert sent == [{**start, "headers": [(b"vary", b"b")]}, body]


def test_the_app_s_own_fault_reaches_serve() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(BehindServe(app)(HTTP, never, nowhere))


def test_the_life_of_the_app_is_not_touched() -> None:
    calls: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        calls.extend((receive, send))

    asyncio.run(BehindServe(app)({"type": "lifespan"}, never, nowhere))
    assert calls == [never, nowhere]

"""deploy/ray, as far as it can be tested without Ray: its files agree, and the app sees disconnects.

`make check-ray` runs it in Ray.
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
def test_configuration_names_existing_functions(name: str) -> None:
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
def test_configuration_has_valid_settings_and_does_not_override_them(name: str) -> None:
    config = configuration(name)
    [application] = config["applications"]
    settings = parse_settings([], application["runtime_env"]["env_vars"])
    assert config["http_options"]["request_timeout_s"] > settings.request_timeout_s
    [deployment] = application["deployments"]
    # app.py takes these from the settings. In the configuration they would override the settings.
    assert not {"ray_actor_options", "graceful_shutdown_timeout_s", "max_ongoing_requests"} & set(deployment)
    scaling = deployment["autoscaling_config"]
    assert 1 <= scaling["min_replicas"] < scaling["max_replicas"]


def test_prometheus_finds_the_list_of_targets() -> None:
    [job] = configuration("prometheus.yml")["scrape_configs"]
    assert job["job_name"] == "vision-sidecar"  # the alerts use this name
    [discovery] = job["http_sd_configs"]
    [path] = re.findall(r'^TARGETS_PATH = "(.+)"$', SOURCE, re.MULTILINE)
    port = configuration("serve.yaml")["http_options"]["port"]
    assert discovery["url"].endswith(f":{port}{path}")
    [rules] = configuration("prometheus.yml")["rule_files"]
    assert (RAY / rules).is_file()


class Waiting:
    """An app that receives until the client disconnects, and notes how it ended."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.ended = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while not self.received or self.received[-1] != "http.disconnect":
                self.received.append((await receive())["type"])
            await asyncio.sleep(0)  # work at the end of the request
            self.ended = "normally"
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("no message comes")


async def nowhere(message: Message) -> None:
    raise AssertionError("nothing must be sent")


def test_cancelled_request_is_a_disconnect() -> None:
    app = Waiting()

    async def cancel() -> None:
        request = asyncio.create_task(BehindServe(app)(HTTP, never, nowhere))
        await asyncio.sleep(0.01)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request

    asyncio.run(cancel())
    assert (app.received, app.ended) == (["http.disconnect"], "normally")


def test_error_while_receiving_is_a_disconnect() -> None:
    app = Waiting()
    messages: list[Message | Exception] = [{"type": "http.request"}, RuntimeError("the proxy has ended")]

    async def receive() -> Message:
        message = messages.pop(0)
        if isinstance(message, Exception):
            raise message
        return message

    asyncio.run(BehindServe(app)(HTTP, receive, nowhere))
    assert (app.received, app.ended) == (["http.request", "http.disconnect"], "normally")


def test_only_the_request_id_is_removed_from_answers() -> None:
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


def test_error_of_the_app_reaches_serve() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(BehindServe(app)(HTTP, never, nowhere))


def test_lifespan_is_passed_through() -> None:
    calls: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        calls.extend((receive, send))

    asyncio.run(BehindServe(app)({"type": "lifespan"}, never, nowhere))
    assert calls == [never, nowhere]

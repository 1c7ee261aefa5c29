"""The server's app as a Ray Serve application: `serve deploy deploy/ray/serve.yaml`.

Serve routes, scales and restarts; a replica is one process with the app that `vision-sidecar serve` runs.
Knows Ray, and the app's settings and life cycle; nothing of images. Every node needs this project with its
extra `ray`, and on `PYTHONPATH` the folder above `deploy`.
"""

from __future__ import annotations

import asyncio
import os
import warnings

import ray
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from PIL import Image
from prometheus_client import CollectorRegistry, disable_created_metrics, start_http_server
from ray import serve

from deploy.ray.adapter import BehindServe
from service.app import create_app
from service.config.arguments import SettingsError, parse_settings
from service.config.logs import configure_logging
from service.config.settings import Settings
from service.engine.engine import Engine, State

TARGETS_PATH = "/metrics/targets"
# More than the queue can hold of the smallest images: the app itself refuses what is too much, with 429.
MAX_ONGOING_REQUESTS = 4096
# From the end of the last request to the end of the threads.
_CLOSING_S = 5.0
_TARGETS_TIMEOUT_S = 5.0


def build(arguments: dict[str, str]) -> serve.Application:
    """The application that the variables `VISION_SIDECAR_*` describe. Raises `SettingsError`."""
    if arguments:
        raise SettingsError("settings are variables, under runtime_env: env_vars; there are no args")
    settings = parse_settings([], os.environ)
    return Sidecar.options(
        ray_actor_options={"num_cpus": settings.decode_threads, "num_gpus": num_gpus(settings)},
        graceful_shutdown_timeout_s=settings.shutdown_grace_s + _CLOSING_S,
    ).bind()


def num_gpus(settings: Settings) -> int:
    """GPUs that a replica needs: none in a cluster that has none, unless the settings ask for one."""
    wants_gpu = settings.device.startswith("cuda") or (
        settings.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0
    )
    return settings.data_parallel_size if wants_gpu else 0


def build_app() -> FastAPI:
    """The app of one replica, in its process. Its metrics have a port of their own, `app.state.target`."""
    settings = parse_settings([], os.environ)
    configure_logging(settings.log_level, settings.log_format)
    # The limit is `max_image_pixels`.
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
    registry = CollectorRegistry()
    app = create_app(settings, registry=registry)
    app.add_middleware(BehindServe)
    app.add_api_route(TARGETS_PATH, list_targets, include_in_schema=False)
    app.state.target = serve_metrics(registry)
    return app


def serve_metrics(registry: CollectorRegistry) -> str:
    """Serves the metrics of this process on a free port of the node, and returns the address."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # nor has the app's own page them
    node_id = ray.get_runtime_context().get_node_id()
    host = next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == node_id)
    server, _ = start_http_server(0, host, registry)
    return f"[{host}]:{server.server_port}" if ":" in host else f"{host}:{server.server_port}"


async def list_targets(request: Request) -> Response:
    """Where each replica that takes requests has its metrics, as `http_sd_configs` of Prometheus wants it."""
    context = serve.get_replica_context()
    handle = serve.get_deployment_handle(context.deployment, context.app_name)
    asked = handle.broadcast("metrics_target")
    # One that dies meanwhile is no target.
    answers = await asked.results_async(timeout_s=_TARGETS_TIMEOUT_S, return_exceptions=True)
    return JSONResponse([answer for answer in answers if not isinstance(answer, BaseException)])


class Replica:
    """One process with the app. Serve asks it for its health, and the other replicas for its address."""

    app: FastAPI  # set by `serve.ingress`

    async def check_health(self) -> None:
        """Waits for the model, so that no request comes before it. Raises where only a restart helps."""
        engine: Engine = self.app.state.engine
        while engine.state is State.LOADING:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        if engine.state is State.FAILED:
            raise RuntimeError("the model cannot be loaded or its device failed; the replica's log says more")

    async def metrics_target(self) -> dict[str, object]:
        """A member of Prometheus's list of targets."""
        labels = {"replica": serve.get_replica_context().replica_tag}
        return {"targets": [self.app.state.target], "labels": labels}


Sidecar = serve.deployment(
    serve.ingress(build_app)(Replica), name="VisionSidecar", max_ongoing_requests=MAX_ONGOING_REQUESTS
)

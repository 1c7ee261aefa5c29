"""The app of the server as a Ray Serve application: `serve deploy deploy/ray/serve.yaml`.

Ray Serve routes, scales and restarts. A replica is one process with the app that `vision-sidecar serve` runs.
Every node needs this project with its extra `ray`, and the folder above `deploy` on `PYTHONPATH`. Knows Ray
and the settings and life cycle of the app. Knows nothing of images.
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
# More requests than the queue can hold, even of the smallest images, so that the app itself refuses with 429.
MAX_ONGOING_REQUESTS = 4096
# Time for the threads to end after the last request.
_CLOSING_S = 5.0
_TARGETS_TIMEOUT_S = 5.0


def build(arguments: dict[str, str]) -> serve.Application:
    """The application with the settings of the variables `VISION_SIDECAR_*`. Raises `SettingsError`."""
    if arguments:
        raise SettingsError("set environment variables under runtime_env: env_vars; args are not supported")
    settings = parse_settings([], os.environ)
    return Sidecar.options(
        ray_actor_options={"num_cpus": settings.decode_threads, "num_gpus": num_gpus(settings)},
        graceful_shutdown_timeout_s=settings.shutdown_grace_s + _CLOSING_S,
    ).bind()


def num_gpus(settings: Settings) -> int:
    """GPUs for each replica: none if the cluster has none, unless the settings ask for a GPU."""
    wants_gpu = settings.device.startswith("cuda") or (
        settings.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0
    )
    return settings.data_parallel_size if wants_gpu else 0


def build_app() -> FastAPI:
    """The app of one replica, in its process. Its metrics are at another address, `app.state.target`."""
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
    """Serves the metrics of this process on a free port of the node. Returns the address."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # as on the app's own metrics page
    node_id = ray.get_runtime_context().get_node_id()
    host = next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == node_id)
    server, _ = start_http_server(0, host, registry)
    return f"[{host}]:{server.server_port}" if ":" in host else f"{host}:{server.server_port}"


async def list_targets(request: Request) -> Response:
    """The metrics address of each replica that accepts requests, for `http_sd_configs` of Prometheus."""
    context = serve.get_replica_context()
    handle = serve.get_deployment_handle(context.deployment, context.app_name)
    asked = handle.broadcast("metrics_target")
    # A replica that ends meanwhile is not a target.
    answers = await asked.results_async(timeout_s=_TARGETS_TIMEOUT_S, return_exceptions=True)
    return JSONResponse([answer for answer in answers if not isinstance(answer, BaseException)])


class Replica:
    """One process with the app. Serve asks for its health, and other replicas for its metrics address."""

    app: FastAPI  # set by `serve.ingress`

    async def check_health(self) -> None:
        """Waits until the model is loaded: no request comes earlier. Raises if only a restart helps."""
        engine: Engine = self.app.state.engine
        while engine.state is State.LOADING:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        if engine.state is State.FAILED:
            raise RuntimeError("the model cannot be loaded or its device failed; the replica's log says more")

    async def metrics_target(self) -> dict[str, object]:
        """This replica in Prometheus's list of targets."""
        labels = {"replica": serve.get_replica_context().replica_tag}
        return {"targets": [self.app.state.target], "labels": labels}


Sidecar = serve.deployment(
    serve.ingress(build_app)(Replica), name="VisionSidecar", max_ongoing_requests=MAX_ONGOING_REQUESTS
)

"""The health check of the container: exit code 0 if the server accepts requests, else 1 and the reason.

Host and port come from the environment variables, so do not set them by a flag. Needs nothing but Python.
"""

from __future__ import annotations

import http.client
import os
import sys

EVERY_ADDRESS = ("0.0.0.0", "::")
LOOPBACK = "127.0.0.1"  # a server that listens on every address also listens on this one


def main() -> int:
    host = os.environ.get("VISION_SIDECAR_HOST") or LOOPBACK
    if host in EVERY_ADDRESS:
        host = LOOPBACK
    port = os.environ.get("VISION_SIDECAR_PORT", "")
    if not port.isdecimal():  # not set, or set by Kubernetes for a Service named vision-sidecar
        port = "8080"
    reason = ask(host, int(port))
    if reason:
        sys.stdout.write(f"{host} port {port}: {reason}\n")
    return 1 if reason else 0


def ask(host: str, port: int) -> str:
    """Returns why the server does not accept requests, or an empty string if it does."""
    # Unlike urllib, http.client uses no proxy from the environment.
    connection = http.client.HTTPConnection(host, port, timeout=4)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()
    return "" if answer.status == 200 else f"{answer.status} {answer.reason}"


if __name__ == "__main__":
    sys.exit(main())

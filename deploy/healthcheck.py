"""The container's health check: exit code 0 while the server takes requests, else 1 and the reason.

Host and port come from the environment, so set them there and not by a flag. Needs nothing but Python.
"""

from __future__ import annotations

import http.client
import os
import sys

# What listens on every address, of IPv4 or of both kinds, answers on this one.
EVERY_ADDRESS = ("0.0.0.0", "::")
LOOPBACK = "127.0.0.1"


def main() -> int:
    host = os.environ.get("VISION_SIDECAR_HOST") or LOOPBACK
    if host in EVERY_ADDRESS:
        host = LOOPBACK
    port = os.environ.get("VISION_SIDECAR_PORT", "")
    if not port.isdecimal():  # not set, or an address that Kubernetes gives for a Service of our name
        port = "8080"
    reason = ask(host, int(port))
    if reason:
        sys.stdout.write(f"{host} port {port}: {reason}\n")
    return 1 if reason else 0


def ask(host: str, port: int) -> str:
    """Why the server takes no requests; nothing if it does."""
    # Not through a proxy that the environment names: that is for the way out.
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
